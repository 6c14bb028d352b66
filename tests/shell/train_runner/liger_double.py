"""What the package liger_kernel has for layers, in plain torch: it counts calls, and is wrong where a test says so."""

from __future__ import annotations

from collections import Counter
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.functional import silu
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb


class _Doubled(torch.autograd.Function):
    """The value as it is, and twice its gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        del ctx
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        del ctx
        return 2 * grads[0]


def liger_modules(calls: Counter[str], wrong: str = "") -> dict[str, ModuleType]:
    """Modules by their names. `wrong`: `values` of norms, their `gradients`, or `nothing works`."""

    class LigerRMSNorm(nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            calls["norm"] += 1
            own: Any = self
            if wrong == "nothing works":
                raise RuntimeError("0 active drivers ([]). There should only be one.")
            assert (own.offset, own.casting_mode, own.in_place) == (0.0, "llama", False)
            scaled = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + own.variance_epsilon)
            if wrong == "values":
                scaled = scaled * 1.2
            output = own.weight * (_Doubled.apply(scaled) if wrong == "gradients" else scaled)  # type: ignore[no-untyped-call]
            assert isinstance(output, torch.Tensor)
            return output

    class LigerSwiGLUMLP(nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            calls["mlp"] += 1
            own: Any = self
            output = own.down_proj(silu(own.gate_proj(hidden)) * own.up_proj(hidden))
            assert isinstance(output, torch.Tensor)
            return output

    def liger_rotary_pos_emb(
        query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        calls["rope"] += 1
        rotated: tuple[torch.Tensor, torch.Tensor] = apply_rotary_pos_emb(query, key, cos, sin)
        return rotated

    contents: dict[str, dict[str, Any]] = {
        "liger_kernel": {},
        "liger_kernel.transformers": {},
        "liger_kernel.transformers.rms_norm": {"LigerRMSNorm": LigerRMSNorm},
        "liger_kernel.transformers.rope": {"liger_rotary_pos_emb": liger_rotary_pos_emb},
        "liger_kernel.transformers.swiglu": {"LigerSwiGLUMLP": LigerSwiGLUMLP},
    }
    modules = {}
    for name, content in contents.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(content)
        modules[name] = module
    return modules
