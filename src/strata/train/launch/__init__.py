"""The launcher: starts ranks, orchestrator and API server, keeps them running, and ends them in order."""
