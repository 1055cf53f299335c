"""At which layer two runs of one model part, and whether that is rounding."""
