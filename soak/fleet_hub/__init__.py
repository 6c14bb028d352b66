"""The hub process killed anywhere, and the faults of its PostgreSQL, under hosts and people at work."""
