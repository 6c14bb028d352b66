"""Benchmarks: what a layer achieves beside the bare engine under it, from one interleaved run. Nothing imports this."""
