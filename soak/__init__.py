"""Long campaigns: `python -m soak NAME --seeds N` adds seeds to the record in docs/campaign-record.md."""
