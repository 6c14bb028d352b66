"""The launcher: starts ranks, orchestrator and API servers, supervises them, and stops them in order."""
