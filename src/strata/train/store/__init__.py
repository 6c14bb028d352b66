"""Checkpoints in object storage, beside the folder of the server."""
