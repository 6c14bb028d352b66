"""The index of artifacts in a database: the tables, the rows that both databases share, and one adapter for each."""
