"""The built-in sampler: on each rank a running batch, with what its sequences remember, that goes on by quanta."""
