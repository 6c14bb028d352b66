"""The coordinator's state machine: values and decisions. No clock, no chance, no I/O, no wire format."""
