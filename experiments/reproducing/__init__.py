"""What reproduce makes of all experiments: the report while it grows, and the site's results."""
