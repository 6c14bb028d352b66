"""How a process holds a database: one SQLite thread or a few PostgreSQL connections, and tables with a version."""
