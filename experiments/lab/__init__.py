"""What every binary shares: flags, errors in one line, progress, its entry in the report."""
