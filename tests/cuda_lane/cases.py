"""Which families and ways of training the lane counts, and how small their models are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

VOCABULARY: Final = 512
HEADS: Final = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
SIZES: Final = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "max_position_embeddings": 4096,
    **HEADS,
}
EXPERTS: Final = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
ALL_KINDS: Final = ("llama", "qwen3", "gemma3_text", "qwen3_moe", "gpt_oss")
FAMILIES: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 32},
    "olmo2": {},
    "gemma2": {"sliding_window": 32},
    "gemma3_text": {"sliding_window": 32},
    "qwen3_moe": EXPERTS,
    "gpt_oss": {**EXPERTS, "sliding_window": 32},
    "mixtral": EXPERTS,
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 64,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 48,
        "v_head_dim": 64,
        "head_dim": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "moe_intermediate_size": 128,
    },
}


KINDS: Final = ("lora", "lora, grouped products", "full")
Kind = Literal["lora", "lora, grouped products", "full"]
"""Grouped products are chosen where torch has a kernel for them, compute capabilities 9 and 10, which only a driver
knows."""


class Case(NamedTuple):
    family: str
    kind: Kind


CASES: Final[Mapping[str, Case]] = {
    f"{family} {kind}": Case(family, kind)
    for family in FAMILIES
    for kind in KINDS
    if kind == "lora, grouped products" or family in ALL_KINDS
}
