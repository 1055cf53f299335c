"""The tests of the documentation, and the programs that write parts of it."""
