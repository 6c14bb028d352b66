"""The base model on a rank: loading, sharding, attention, start-up check, memory of a row, trained models, offload."""
