"""The fleet in PostgreSQL: the tables, applying a plan, claiming jobs, and what happens to a lease until it ends."""
