"""Commands about a fleet, for people: each asks the hub of the chosen context and prints what it says."""
