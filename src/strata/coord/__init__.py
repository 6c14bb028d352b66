"""How the workers of one job move together: membership, data shards, barriers, checkpoints, recovery."""
