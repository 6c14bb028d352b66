"""The API server: HTTP requests in, requests to the orchestrator out, and no state of its own."""
