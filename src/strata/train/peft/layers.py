"""Which layers can have a LoRA adapter (attention, MLP, unembedding), their names in PEFT, and the names of
its files.
"""

from __future__ import annotations

from typing import Final, Literal

Kind = Literal["attn", "mlp", "unembed"]

ATTENTION: Final = frozenset({"attention", "attn", "linear_attn", "self_attention", "self_attn"})
"""Names of a layer's attention module in the model families. Every linear layer inside is a projection."""
MIXERS: Final = frozenset({"conv", "mamba", "mixer"})
"""Names of modules that may be state-space layers or short convolutions in the place of attention. Their kernels read
the weights of other layers than `MIXED` without calling the layer, where an adapter would have no effect."""
MIXED: Final = frozenset({"in_proj", "k_proj", "o_proj", "q_proj", "v_proj"})
MLP: Final = frozenset(
    {
        "c_fc", "c_proj", "dense_4h_to_h", "dense_h_to_4h", "down_proj", "fc1", "fc2", "fc_in", "fc_out", "gate_proj",
        "gate_up_proj", "input_linear", "output_linear", "up_proj", "w1", "w2", "w3",
    }
)  # fmt: skip
"""Names of the linear layers of an MLP."""
ROUTERS: Final = frozenset({"gate", "router"})
"""Modules that route tokens to experts; never adapted."""
TOWERS: Final = frozenset(
    {
        "audio_embed", "audio_encoder", "audio_model", "audio_tower", "connector", "embed_audio", "embed_vision",
        "image_embed", "image_encoder", "mm_projector", "multi_modal_projector", "vision_adapter", "vision_encoder",
        "vision_model", "vision_tower", "visual", "visual_embeddings_table", "vqmodel",
    }
)  # fmt: skip
"""Modules for images and sounds, and their projectors into the text model; never adapted: no pass over text calls
them."""
HEADS: Final = frozenset({"embed_out", "lm_head", "output_projection"})
HEAD: Final = "lm_head"

ADAPTER: Final = "adapter_model.safetensors"
ADAPTER_CONFIG: Final = "adapter_config.json"
TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "config.json",
)
"""The tokenizer files that a folder in Hugging Face's format may have; the last one names the tokenizer's class."""
PREFIX: Final = "base_model.model."
EXPERTS: Final = ".experts"
_FUSED: Final = {"gate_up_proj": ".base_layer", "down_proj": ""}
"""PEFT wraps the module of fused experts once for each of its two weights, the first inside the second."""


def is_text(module: str) -> bool:
    """Says whether a module is of the text model."""
    return TOWERS.isdisjoint(module.split("."))


def kind_of(target: str) -> Kind | None:
    """Says which of `train_attn`, `train_mlp` and `train_unembed` selects a layer; None if it is never adapted."""
    above, last = target.split(".")[:-1], target.rpartition(".")[2]
    if not is_text(target):
        return None
    if ATTENTION.intersection(above) or (last in MIXED and MIXERS.intersection(above)):
        return "attn"
    if target in HEADS:
        return "unembed"
    return "mlp" if last in MLP and not ROUTERS.intersection(above) else None


def peft_layer(target: str) -> str:
    """PEFT's name of a layer of the model."""
    above, _, last = target.rpartition(".")
    return above + _FUSED[last] if above.endswith(EXPERTS) and last in _FUSED else target


def target_of(layer: str) -> str:
    """The layer of the model with this name in PEFT."""
    for last, inside in _FUSED.items():
        if layer.endswith(EXPERTS + inside):
            return f"{layer.removesuffix(inside)}.{last}"
    return layer
