"""Trains many runs by one program: swept values, tracing, devices, and files to resume from."""
