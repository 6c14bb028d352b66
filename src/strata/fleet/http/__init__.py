"""The hub's HTTP interface: its routes and their handlers. `strata.http` serves them."""
