"""Verified fakes, real servers to hurt, and the simulation world; imported only by tests and benchmarks."""
