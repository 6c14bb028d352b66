"""The plan of a server: sizes of a model from its files, the arithmetic from sizes to bytes, and defaults by device."""
