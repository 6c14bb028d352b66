"""LoRA adapters: low-rank additions to the linear layers of a frozen base, many adapters in one packed row."""
