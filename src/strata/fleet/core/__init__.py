"""The fleet's decisions as values: no clock, no chance, no I/O, no SQL and no wire format."""
