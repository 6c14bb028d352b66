"""The `strata` command: arguments in, calls into a layer, rows out. No rule of any layer is decided here.

A command imports its layer inside the function, so that `--help` works in a base install and start-up stays short.
"""
