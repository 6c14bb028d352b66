"""Processes, built from settings: here the layers meet."""
