"""Which layers of a model can have an adapter, by the last part of their names, and what PEFT calls them."""

from __future__ import annotations

from typing import Final

ATTENTION: Final = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"})
MLP: Final = frozenset({"gate_proj", "up_proj", "down_proj", "gate_up_proj"})
HEAD: Final = "lm_head"

ADAPTER: Final = "adapter_model.safetensors"
ADAPTER_CONFIG: Final = "adapter_config.json"
PREFIX: Final = "base_model.model."
EXPERTS: Final = ".experts"
_FUSED: Final = {"gate_up_proj": ".base_layer", "down_proj": ""}
"""PEFT wraps the module of all experts once for each of its two weights, the first inside the second."""


def peft_layer(target: str) -> str:
    """What PEFT calls a layer of the model."""
    above, _, last = target.rpartition(".")
    return above + _FUSED[last] if above.endswith(EXPERTS) and last in _FUSED else target


def target_of(layer: str) -> str:
    """The layer of the model that PEFT calls so."""
    for last, inside in _FUSED.items():
        if layer.endswith(EXPERTS + inside):
            return f"{layer.removesuffix(inside)}.{last}"
    return layer
