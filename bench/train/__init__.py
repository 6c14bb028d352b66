"""The training server beside a plain torchrun loop."""
