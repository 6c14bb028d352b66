"""Finds the weights of a model that LoRA can train (`train_attn`, `train_mlp`, `train_unembed`), and words why others
cannot be adapted.

The experts of a mixture are one module with one fused weight; `experts.py` computes them with their adapters. Experts
of another form keep their own computation and get no adapter (`is_experts`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from strata.base.errors import Code, StrataError
from strata.train.core.model_options import LoraConfig
from strata.train.peft.layers import ATTENTION, MIXERS, Kind, is_text, kind_of
from strata.train.runner.model.quantised import QuantisedLinear


@dataclass(frozen=True)
class LoraTarget:
    """A weight that can have an adapter: one matrix, or one for each of `experts` fused experts."""

    name: str
    rows: int
    columns: int
    experts: int = 0

    @property
    def kind(self) -> Kind | None:
        return "mlp" if self.experts else kind_of(self.name)


def targets_of(model: nn.Module, config: LoraConfig) -> list[LoraTarget]:
    """The weights that `config` selects, in the order of the model: all of a kind, or an error."""
    selected = _selected_kinds(config)
    targets = [target for target in _adaptable_weights(model) if target.kind in selected]
    kinds = {target.kind for target in targets}
    for kind in selected:
        if weight := _unadaptable_weight(model, kind):
            raise StrataError(Code.INVALID, f"train_{kind} must be off: {weight} cannot be adapted")
    for kind in selected:
        if kind not in kinds:
            raise StrataError(Code.INVALID, f"this base has no layers for train_{kind}")
    return targets


def require_targets(model: nn.Module) -> None:
    """UNSUPPORTED if adapters can train nothing of the model, with the reason of each kind of layers."""
    reasons = []
    for kind in ("attn", "mlp", "unembed"):
        selected = {f"train_{other}": other == kind for other in ("attn", "mlp", "unembed")}
        try:
            targets_of(model, LoraConfig(rank=1, **selected))
        except StrataError as error:
            reasons.append(error.message)
        else:
            return
    raise StrataError(Code.UNSUPPORTED, f"adapters can train nothing of it: {'; '.join(reasons)}")


def _selected_kinds(config: LoraConfig) -> list[Kind]:
    trained: dict[Kind, bool] = {"attn": config.train_attn, "mlp": config.train_mlp, "unembed": config.train_unembed}
    selected = [kind for kind, is_trained in trained.items() if is_trained]
    if not selected:
        raise StrataError(Code.INVALID, "nothing is to be trained: set train_attn, train_mlp or train_unembed")
    return selected


def _adaptable_weights(model: nn.Module) -> Iterator[LoraTarget]:
    for name, module in _text_modules(model):
        if kind_of(name) is not None and (shape := linear_shape(module)) is not None:
            yield LoraTarget(name, *shape)
        if is_experts(module):
            for weight in ("gate_up_proj", "down_proj"):
                count, rows, columns = getattr(module, weight).shape
                if module.is_transposed:
                    rows, columns = columns, rows
                yield LoraTarget(f"{name}.{weight}", rows, columns, count)


def linear_shape(module: nn.Module) -> tuple[int, int] | None:
    """Outputs and inputs of a linear layer; None if the module is not one."""
    if isinstance(module, nn.Linear | QuantisedLinear):
        return module.out_features, module.in_features
    return (module.nf, module.nx) if isinstance(module, Conv1D) else None


def is_transposed(model: nn.Module, target: str) -> bool:
    """Says whether the weight of this layer, or of each expert, is stored as (inputs, outputs)."""
    above, _, last = target.rpartition(".")
    module: Any = model.get_submodule(above)
    return bool(module.is_transposed) if is_experts(module) else isinstance(getattr(module, last), Conv1D)


def _unadaptable_weight(model: nn.Module, kind: Kind) -> str:
    """A weight of this kind that no adapter can be added to; empty if there is none."""
    match kind:
        case "attn":
            return _unadaptable_attention(model)
        case "mlp":
            return _unadaptable_experts(model)
        case "unembed":
            return ""


def _text_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((name, module) for name, module in model.named_modules() if is_text(name))


def _unadaptable_attention(model: nn.Module) -> str:
    """A matrix of attention, or an attention module under an unknown name. A convolution is no matrix."""
    for name, module in _text_modules(model):
        if type(module).__name__.endswith("Attention") and not (ATTENTION | MIXERS).intersection(name.split(".")):
            return str(name)
        if ATTENTION.intersection(name.split(".")) and not (linear_shape(module) or isinstance(module, nn.Conv1d)):
            for last, parameter in module.named_parameters(recurse=False):
                if sum(size > 1 for size in parameter.shape) > 1:
                    return f"{name}.{last}"
    return ""


def _unadaptable_experts(model: nn.Module) -> str:
    for name, module in _text_modules(model):
        own = [last for last, parameter in module.named_parameters(recurse=False) if parameter.ndim == 3]
        if own and not is_experts(module) and not isinstance(module, nn.Conv1d):
            return f"{name}.{own[0]}"
    return ""


def is_experts(module: Any) -> bool:
    """A mixture's experts as one module with one weight for all of them, (expert, out, in) or transposed, whose loop
    and gate are those that transformers gives every such module (`use_experts_implementation`)."""
    weights = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    if not all(isinstance(weight, nn.Parameter) and weight.ndim == 3 for weight in weights):
        return False
    declared = hasattr(module, "_apply_gate") and hasattr(module, "is_transposed")
    return declared and bool(module.has_gate)
