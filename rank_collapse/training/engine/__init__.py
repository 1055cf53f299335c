"""The engine that trains many runs of one program: axes, traced functions, devices, files."""
