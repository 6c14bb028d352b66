"""Inference engines beside the server: told of new weights, and asked for samples of them."""
