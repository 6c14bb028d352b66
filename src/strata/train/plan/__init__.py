"""The plan of a server's memory: sizes of a model from its files, and the arithmetic from sizes to a device's bytes."""
