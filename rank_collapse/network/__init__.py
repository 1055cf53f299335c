"""The one network: its parts, its configuration, its parameters, and `apply`."""
