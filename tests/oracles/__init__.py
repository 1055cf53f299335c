"""Independent computations to compare with, and the networks and inputs that tests compare."""
