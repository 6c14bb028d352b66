"""Commands about a fleet: each calls the hub of the current context and prints its reply."""
