"""What the trained experiments share."""
