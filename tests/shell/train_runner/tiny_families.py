"""Every causal language model family of the installed transformers, tiny, from its configuration alone.

One table of small sizes serves nearly all families; what a family needs besides stands in `OWN`. The weights are drawn
so that every feature counts: a sink, a clamp, a bias or a cap that is left out changes the log-probabilities.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

VISION: Final = (
    "aya_vision", "exaone4_5", "glm4v", "glm4v_moe", "glm5_next", "idefics3", "internvl", "kimi_k25", "lfm2_vl",
    "llava", "minimax_m3_vl", "mistral3", "mistral4", "nemotron_h_omni", "ovis2", "paligemma", "qwen2_5_vl", "qwen2_vl",
    "qwen3_vl", "qwen3_vl_moe", "smolvlm", "step3p7",
)  # fmt: skip
"""Families that transformers has with their towers for images alone."""
FAMILIES: Final = tuple(sorted((*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VISION)))
VOCABULARY: Final = 128
LARGEST: Final = 4_000_000
"""Parameters: what is larger was not made tiny by the table."""

_SIZES: Final = (
    (
        64,
        "hidden_size d_model n_embd embedding_dim emb_dim embedding_size lru_width word_embed_proj_dim "
        "attention_hidden_size input_embedding_size output_embedding_size original_max_position_embeddings "
        "out_hidden_size vision_output_dim projector_input_dim projector_output_dim image_size crop_size "
        "output_channels",
    ),
    (
        4,
        "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads "
        "num_decoder_attention_heads encoder_attention_heads num_experts num_local_experts n_routed_experts "
        "moe_num_experts linear_num_key_heads linear_num_value_heads linear_num_heads time_step_rank "
        "mamba_dt_rank index_block_size",
    ),
    (
        2,
        "num_key_value_heads num_kv_heads swa_num_key_value_heads num_hidden_layers n_layer n_layers "
        "num_layers decoder_layers encoder_layers num_decoder_layers num_encoder_layers num_blocks "
        "num_layers_per_stack depth num_global_layers num_experts_per_tok moe_topk moe_k num_experts_per_token "
        "index_n_heads o_groups hc_mult hc_count eos_token_id type_vocab_size index_topk_blocks",
    ),
    (
        16,
        "head_dim v_head_dim kv_channels swa_head_dim qk_nope_head_dim dim_head d_head attention_head_size "
        "attention_head_dim kv_lora_rank q_lora_rank o_lora_rank laurel_rank hc_lowrank adapter_rank "
        "router_hidden_size hidden_size_per_layer_input ple_embed_dim linear_key_head_dim "
        "linear_value_head_dim linear_head_dim mamba_d_head mamba_head_dim mamba_d_state ssm_state_size "
        "state_size mamba_chunk_size chunk_size index_head_dim",
    ),
    (
        96,
        "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size dff dim_ff d_inner "
        "feed_forward_size intermediate_size_mlp dense_intermediate_size mlp_dim",
    ),
    (
        32,
        "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size "
        "moe_shared_expert_intermediate_size shared_intermediate_size",
    ),
    (
        1,
        "n_shared_experts num_shared_experts moe_num_shared_experts zero_expert_num n_group topk_group "
        "num_expert_group first_k_dense_replace num_dense_layers moe_layer_start_index bos_token_id",
    ),
    (VOCABULARY, "vocab_size vocab_size_per_layer_input"),
    (
        128,
        "max_position_embeddings n_positions n_ctx max_seq_len model_max_length max_target_positions "
        "max_source_positions context_length mamba_d_ssm",
    ),
    (
        9,
        "sliding_window window_size attention_window_size sliding_window_size local_attention attention_chunk_size",
    ),
    (
        8,
        "qk_rope_head_dim rotary_dim mamba_n_heads mamba_num_heads swa_num_attention_heads index_topk floor_scale",
    ),
    (0, "pad_token_id num_kv_shared_layers rescale_every num_nextn_predict_layers"),
    (24, "qk_head_dim"),
    (True, "is_decoder"),
    (4.0, "logits_scaling"),
    (0.7, "residual_multiplier"),
    (2.0, "embedding_multiplier"),
    (0.3, "attention_multiplier"),
)
"""Small values, and the fields of configurations that take them where a family has them."""
_TYPES: Final = ("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types")
"""Lists with the kind of every layer: a tiny model has each kind once."""

_SECTIONS: Final = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_HALF_SECTIONS: Final = {**_SECTIONS, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
OWN: Final[Mapping[str, Mapping[str, Any]]] = {
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "glm4v_moe_text": {"rope_parameters": _HALF_SECTIONS},
    "glm4v_text": {"rope_parameters": _HALF_SECTIONS},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "qwen2_5_vl_text": {"rope_parameters": _SECTIONS},
    "qwen2_vl_text": {"rope_parameters": _SECTIONS},
    "qwen2_vl_vision": {"embed_dim": 64},
    "roc_bert": {
        "pronunciation_vocab_size": 64,
        "shape_vocab_size": 64,
        "pronunciation_embed_dim": 16,
        "shape_embed_dim": 16,
    },
    "mllama_vision_model": {"intermediate_layers_indices": [0], "vision_output_dim": 128},
    "mllama_text_model": {"cross_attention_layers": [1]},
    "zaya": {"num_experts_per_tok": 1},
}


def config_of(family: str, **changes: Any) -> Any:
    """The tiny configuration; raises whatever the family's own class raises."""
    kind = CONFIG_MAPPING[family]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        usual = kind().to_dict()
        # Of the text model, and of towers for images and sounds.
        parts = {
            name: config_of(usual[name]["model_type"])
            for name in kind.sub_configs
            if isinstance(usual.get(name), dict) and usual[name].get("model_type") in CONFIG_MAPPING
        }
        named = {name: value for value, names in _SIZES for name in names.split()}
        # What a family has none of (0) it does not need in a small size.
        sizes = {name: value for name, value in named.items() if usual.get(name, 0) != 0 or value is True}
        sizes = {name: value for name, value in sizes.items() if name in usual}
        sizes |= _layers(usual)
        if usual.get("qk_rope_head_dim"):
            sizes |= {"head_dim": sizes["qk_rope_head_dim"], "num_key_value_heads": sizes["num_attention_heads"]}
        return kind(**sizes | parts | dict(OWN.get(family, {})) | changes)


def _layers(usual: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, list[str]] = {}
    for name in _TYPES:
        if isinstance(usual.get(name), list) and usual[name]:
            found[name] = list(dict.fromkeys(usual[name]))
    count = max([2, *(len(kinds) for kinds in found.values())])
    return {name: [*kinds, *[kinds[-1]] * (count - len(kinds))] for name, kinds in found.items()} | (
        {"num_hidden_layers": count} if found else {}
    )


def shape_of(family: str, **changes: Any) -> PreTrainedModel:
    """The modules of a tiny model, on the device that is set."""
    config = config_of(family, **changes)
    model: Any = auto_class(config).from_config(config, dtype=torch.float32)
    assert isinstance(model, PreTrainedModel)
    return model


def auto_class(config: Any) -> Any:
    """What reads and writes the checkpoints of a family: for one with towers, not its text model alone."""
    towers = config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return AutoModelForImageTextToText if towers else AutoModelForCausalLM


def make(family: str, folder: Path, **changes: Any) -> None:
    """A tiny model of the family in `folder`, in Hugging Face's form."""
    with torch.device("meta"):
        shape = shape_of(family, **changes)
    size = sum(tensor.numel() for tensor in (*shape.parameters(), *shape.buffers()))
    if size > LARGEST:
        raise ValueError(f"its smallest form here has {size:,} numbers")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = shape_of(family, **changes)
    draw(model)
    model.save_pretrained(str(folder))


@torch.no_grad()
def draw(model: torch.nn.Module) -> None:
    """Weights of a size at which activations leave the linear range; nothing zero that a feature hangs on."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        last = name.rpartition(".")[2]
        if parameter.ndim >= 2:
            gain = 4.0 if "gate" in name else 1.5
            parameter.copy_(noise * gain / parameter.shape[-1] ** 0.5)
        elif "norm" in name or last == "weight":
            parameter.add_(0.2 * noise)
        else:
            parameter.add_(0.5 * noise)
    for name, buffer in model.named_buffers():
        if "bias" in name.rpartition(".")[2] and buffer.is_floating_point():
            buffer.add_(0.5 * torch.randn(buffer.shape, generator=generator))
