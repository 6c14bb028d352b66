"""The only converters between what clients send and receive and the operations of the core."""
