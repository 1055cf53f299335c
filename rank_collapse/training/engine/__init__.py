"""Many runs of one training program: its axes, its trace, groups on devices, files, result."""
