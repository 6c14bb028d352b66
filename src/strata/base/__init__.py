"""What every layer stands on: errors, clock, digests, ids, TOML, secrets, settings, logging, loops, failpoints.

Standard library, msgspec and rfc8785 only; no word of any domain (no job, worker, shard, model) may appear here.
"""
