"""How a process holds a database: one SQLite thread or a few PostgreSQL connections, and tables with a version.

`objects` has the errors of the other place where much is kept, a bucket.
"""
