"""Fused kernels of others in the layers of a model (Liger's norms, rotary embedding and SwiGLU) and below its attention
(FA3, FA4), and the check that they compute what the plain path does.

A kernel is used only after one packed row, forward and backward, has agreed with the plain path on the same ranks. A
server whose kernel disagrees does not start: one that went on without it would compute something else than it did
before, or than it would after the next start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.attention import activate_flash_attention_impl
from transformers import PreTrainedModel

from strata.base.errors import Code, StrataError
from strata.train.runner.lora.targets import is_experts
from strata.train.runner.model.process_memory import is_out_of_memory
from strata.train.runner.model.startup_check import FAILURES, first_line, within_tolerance
from strata.train.runner.passes.logprobs import PackedRow
from strata.train.runner.settings import RunnerSettings

GRADIENT_TOLERANCE: Final = {"float64": 1e-3, "float32": 1e-3, "bfloat16": 0.25}
"""How far a gradient may be from that of the plain path, as a share of its norm. Rounding in bfloat16 adds up over
layers: plain passes in it are 0.07 from float32 in 32 layers. A factor that is missing or doubled gives 0.5 or more."""
ROTARY: Final = "apply_rotary_pos_emb"
"""The function that attention of the families in `combinations.FUSED_FAMILIES` calls."""


class FusedKernel(NamedTuple):
    setting: str
    name: str
    use: Callable[[], None]


class RowResult(NamedTuple):
    logprobs: torch.Tensor
    gradients: Sequence[torch.Tensor]
    """That of what the first layer of this rank gets, and in full training those of norms."""


def kernels_of(settings: RunnerSettings, lm: PreTrainedModel) -> list[FusedKernel]:
    kernels = []
    if settings.fused_layers:
        kernels.append(FusedKernel("model.fused_layers", settings.fused_layers, partial(fuse_layers, lm)))
    if settings.attention:
        use = partial(activate_flash_attention_impl, settings.attention)
        kernels.append(FusedKernel("model.attention", settings.attention, use))
    return kernels


def fuse_layers(lm: PreTrainedModel) -> None:
    """Replaces norms, rotary embeddings and the product of a gated MLP in each module by Liger's.

    An MLP still calls its three linear layers, for their hooks are where adapters and slices are. Experts keep the
    grouped products that they have here. Nothing is replaced in the code of transformers: other models of this process
    stay as they are.
    """
    from liger_kernel.transformers.rms_norm import LigerRMSNorm  # type: ignore[import-not-found, import-untyped, unused-ignore]
    from liger_kernel.transformers.rope import liger_rotary_pos_emb  # type: ignore[import-not-found, import-untyped, unused-ignore]
    from liger_kernel.transformers.swiglu import LigerSwiGLUMLP  # type: ignore[import-not-found, import-untyped, unused-ignore]

    gated = lm.config.get_text_config(decoder=True).hidden_act == "silu"
    fused = set()
    for module in lm.modules():
        forward = type(module).forward
        if type(module).__name__.endswith("RMSNorm"):
            # Not in place: the gradient of a norm's output may be that of another tensor too.
            options = {"offset": 0.0, "casting_mode": "llama", "in_place": False, "row_mode": None}
            vars(module).update(options)
            _replace_forward(module, LigerRMSNorm.forward)
            fused.add("norms")
        elif type(module).__name__.endswith("MLP") and gated:
            _replace_forward(module, LigerSwiGLUMLP.forward)
            fused.add("gated layers")
        elif isinstance(forward, FunctionType) and ROTARY in forward.__code__.co_names:
            names = {**forward.__globals__, ROTARY: liger_rotary_pos_emb}
            copied = FunctionType(forward.__code__, names, None, forward.__defaults__, forward.__closure__)
            copied.__kwdefaults__ = forward.__kwdefaults__
            _replace_forward(module, copied)
            fused.add("rotary embeddings")
        elif is_experts(module):
            fused.add("gated layers")
    if missing := {"norms", "rotary embeddings", "gated layers"} - fused:
        raise StrataError(Code.UNSUPPORTED, f"no {' and no '.join(sorted(missing))} were found to fuse")


def _replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    module.forward = MethodType(forward, module)


def compute_row(
    logprobs: Callable[[PackedRow], torch.Tensor], row: PackedRow, lm: PreTrainedModel, first: nn.Module
) -> RowResult:
    """A pass over the row, forward and backward; no gradient is left. `first` is the first layer of this rank. All
    ranks call it together."""
    of_input: list[torch.Tensor] = []

    def watch(module: nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, Any]) -> None:
        del module
        hidden = args[0] if args else kwargs["hidden_states"]
        if hidden.requires_grad:
            hidden.register_hook(of_input.append)

    handle = first.register_forward_pre_hook(watch, with_kwargs=True)
    try:
        computed = logprobs(row)
        weights = torch.rand(len(computed), generator=torch.Generator().manual_seed(2)).to(computed.device)
        (computed * weights).sum().backward()  # type: ignore[no-untyped-call]
    finally:
        handle.remove()
    # A layer that is recomputed sees its input twice.
    gradients = [of_input[-1]]
    for parameter in lm.parameters():
        if parameter.ndim == 1 and parameter.grad is not None:
            gradients.append(parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad)
        parameter.grad = None
    return RowResult(computed.detach(), gradients)


@contextmanager
def kernel_errors(kernel: FusedKernel) -> Iterator[None]:
    """Makes whatever a kernel or its package raises an UNSUPPORTED error that names the setting."""
    try:
        yield
    except StrataError as error:
        raise _unfit(kernel, error.message) from error
    except (ImportError, *FAILURES) as error:
        if is_out_of_memory(error):
            raise
        raise _unfit(kernel, f"it fails with {type(error).__name__}: {first_line(error)}") from error


def verify_agreement(kernel: FusedKernel, fused: RowResult, plain: RowResult, dtype: str) -> tuple[float, float]:
    """Returns how far log probabilities and gradients are apart. UNSUPPORTED if they do not agree."""
    apart = float((fused.logprobs - plain.logprobs).abs().max())
    if not within_tolerance(fused.logprobs, plain.logprobs, dtype):
        raise _unfit(kernel, f"its log probabilities are not those of the plain path (off by {apart:.2g} nats)")
    pairs = zip(fused.gradients, plain.gradients, strict=True)
    shares = [float((own - other).norm()) / max(float(other.norm()), 1e-30) for own, other in pairs]
    # Not `max`, which a NaN may escape.
    worst = math.nan if any(map(math.isnan, shares)) else max(shares)
    if not worst <= GRADIENT_TOLERANCE[dtype]:
        raise _unfit(kernel, f"its gradients are not those of the plain path (off by {worst:.2g} of their norm)")
    return apart, worst


def _unfit(kernel: FusedKernel, why: str) -> StrataError:
    return StrataError(
        Code.UNSUPPORTED, f"{kernel.setting} cannot be {kernel.name} here: {why}; leave {kernel.setting} out"
    )
