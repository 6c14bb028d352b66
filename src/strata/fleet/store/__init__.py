"""The fleet in a database: one package for SQLite, one for PostgreSQL, laid out alike, and the rows that both share."""
