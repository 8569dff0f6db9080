"""Benchmarks: our samplers and training beside those of other libraries, in turns, on one graph and machine."""
