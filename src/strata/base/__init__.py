"""What every layer stands on: errors, clock, digests, ids, TOML, secrets, settings, logging, loops, failpoints.

Standard library, msgspec and rfc8785 only; no term of a domain (job, worker, shard, model) may appear here.
"""
