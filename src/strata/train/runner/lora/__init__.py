"""LoRA adapters: their parameters and hooks, adapters of experts, and the slots they occupy on the device."""
