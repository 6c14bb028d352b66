"""The API server: HTTP in front, the orchestrator behind, and nothing kept in between."""
