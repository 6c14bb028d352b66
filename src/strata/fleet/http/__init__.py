"""The hub's HTTP interface: one table of endpoints, and authentication at its root."""
