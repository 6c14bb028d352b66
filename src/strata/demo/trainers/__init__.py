"""The jobs of `strata demo` that need no torch, in a folder that is sent to the hub as any trainer's."""
