"""Machines with CUDA devices that nobody has here, models as their files would say, and settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from strata.base.settings import load
from strata.train.plan.defaults import ResolvedSettings, resolve_settings
from strata.train.plan.devices import Device, Hardware
from strata.train.plan.model_files import ModelFiles
from strata.train.settings import ServerSettings

GB: Final = 10**9


def machine(count: int, gb: float, free: float | None = None, **more: Any) -> Hardware:
    devices = [
        Device(str(n), f"GPU-{n:04}", "NVIDIA Double", int(gb * GB), int((gb if free is None else free) * GB), 9.0)
        for n in range(count)
    ]
    return Hardware(devices=devices, **{"cores": 32, "memory_bytes": 512 * GB, **more})


def llama_8b() -> ModelFiles:
    """The shapes of Llama-3.1-8B: 8,030,261,248 parameters."""
    layer = {
        "self_attn.q_proj": (4096, 4096), "self_attn.k_proj": (1024, 4096), "self_attn.v_proj": (1024, 4096),
        "self_attn.o_proj": (4096, 4096), "mlp.gate_proj": (14_336, 4096), "mlp.up_proj": (14_336, 4096),
        "mlp.down_proj": (4096, 14_336), "input_layernorm": (4096,), "post_attention_layernorm": (4096,),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        f"model.layers.{number}.{name}.weight": shape for number in range(32) for name, shape in layer.items()
    }
    ends = {"model.embed_tokens.weight": (128_256, 4096), "lm_head.weight": (128_256, 4096)}
    shapes |= {**ends, "model.norm.weight": (4096,)}
    config = {
        "model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "hidden_size": 4096,
    }  # fmt: skip
    return ModelFiles(shapes, config)


def settings(**written: Any) -> ServerSettings:
    """By dotted names, with underscores for dots: `model_dtype="float32"`."""
    sections: dict[str, msgspec.Struct] = {}
    for section in msgspec.structs.fields(ServerSettings):
        flags = {
            name.removeprefix(f"{section.name}_"): value
            for name, value in {"model_path": "m", "server_data": Path("/data"), **written}.items()
            if name.startswith(f"{section.name}_")
        }
        sections[section.name] = load(section.type, section=section.name, file=None, environ={}, flags=flags)
    return ServerSettings(**sections)  # type: ignore[arg-type]


def resolve(on: Hardware, files: ModelFiles | None = None, **written: Any) -> ResolvedSettings:
    return resolve_settings(settings(**written), on, llama_8b() if files is None else files)
