"""The circle: two walkers that attention brings together."""
