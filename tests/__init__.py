"""The tests: `tests/<package>/test_<module>.py` for each module of the library."""
