"""The built-in sampler: on each rank a running batch with a KV cache, which decodes in time slices."""
