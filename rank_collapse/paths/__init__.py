"""Paths through a network: counted, sampled, evaluated one by one, and all summed by length."""
