"""Configurations of models as published, without what changes no size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

LLAMA_8B: Final[Mapping[str, Any]] = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128_256,
    "max_position_embeddings": 131_072, "tie_word_embeddings": False,
}  # fmt: skip
"""Llama 3.1 8B."""
QWEN3_30B_A3B: Final[Mapping[str, Any]] = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "vocab_size": 151_936, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "max_position_embeddings": 40_960, "tie_word_embeddings": False,
}  # fmt: skip
