"""The orchestrator: one process between API servers and rank 0, and the only one that reads and writes the journal."""
