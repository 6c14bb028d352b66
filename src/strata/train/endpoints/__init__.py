"""Inference endpoints: engines to which new weights are published and samples are routed."""
