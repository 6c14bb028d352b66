"""Checkpoints of models: saved and loaded by all ranks together, their file formats, shards, and export."""
