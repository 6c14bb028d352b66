"""Maintenance loops of a leading orchestrator. Each is a class with a `run_once` that can be repeated at any time."""
