"""Campaigns against a whole training server."""
