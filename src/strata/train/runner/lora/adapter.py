"""Adapters: low-rank additions to the linear layers of a frozen base, many at a time over one packed row.

An adapter's parameters are the same on every rank and stand outside the model's module tree: sharding, saving and
freezing of the base never see them. Each layer they belong to carries one forward hook, which adds to every span of
the row what the adapter of that span says. Gradients gather on each rank and are summed over the ranks at a step.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

from strata.base.errors import Code, StrataError
from strata.train.core.ops import LoraConfig
from strata.train.peft.layers import ATTENTION, kind_of


@dataclass(frozen=True)
class Target:
    """A weight that can have an adapter. Fused experts have `experts` of them, else it is one matrix."""

    name: str
    rows: int
    columns: int
    experts: int = 0


def targets_of(model: nn.Module, config: LoraConfig) -> list[Target]:
    """The weights that `config` asks for, in the order of the model: all of a kind, or an error."""
    targets: list[Target] = []
    for name, module in model.named_modules():
        kind = kind_of(name)
        if kind is not None and getattr(config, f"train_{kind}") and (sides := sides_of(module)) is not None:
            targets.append(Target(name, *sides))
        if is_experts(module) and config.train_mlp:
            for weight in ("gate_up_proj", "down_proj"):
                count, rows, columns = getattr(module, weight).shape
                targets.append(Target(f"{name}.{weight}", rows, columns, count))
    if config.train_attn and (weight := _unadaptable_attention(model)):
        raise StrataError(Code.INVALID, f"train_attn must be off: {weight} cannot be adapted")
    if config.train_mlp and (weight := _unadaptable_experts(model)):
        raise StrataError(Code.INVALID, f"train_mlp must be off: {weight} cannot be adapted")
    kinds = {"mlp" if target.experts else kind_of(target.name) for target in targets}
    for kind in ("attn", "mlp", "unembed"):
        if getattr(config, f"train_{kind}") and kind not in kinds:
            raise StrataError(Code.INVALID, f"this base has no layers for train_{kind}")
    if not targets:
        raise StrataError(Code.INVALID, "nothing is to be trained: set train_attn, train_mlp or train_unembed")
    return targets


def sides_of(module: nn.Module) -> tuple[int, int] | None:
    """Outputs and inputs of a linear layer; None if it is none."""
    if isinstance(module, nn.Linear):
        return module.out_features, module.in_features
    return (module.nf, module.nx) if isinstance(module, Conv1D) else None


def is_turned(model: nn.Module, target: str) -> bool:
    """Whether the weight of this layer is stored as (inputs, outputs)."""
    above, _, last = target.rpartition(".")
    return isinstance(getattr(model.get_submodule(above), last), Conv1D)


def _unadaptable_attention(model: nn.Module) -> str:
    """A matrix of attention that no adapter can be added to, or a module of attention under a name not known here."""
    for name, module in model.named_modules():
        if type(module).__name__.endswith("Attention") and not ATTENTION.intersection(name.split(".")):
            return str(name)
        if ATTENTION.intersection(name.split(".")) and sides_of(module) is None:
            for last, parameter in module.named_parameters(recurse=False):
                if parameter.ndim > 1:
                    return f"{name}.{last}"
    return ""


def _unadaptable_experts(model: nn.Module) -> str:
    for name, module in model.named_modules():
        own = [last for last, parameter in module.named_parameters(recurse=False) if parameter.ndim == 3]
        if own and not is_experts(module) and not isinstance(module, nn.Conv1d):
            return f"{name}.{own[0]}"
    return ""


def is_experts(module: Any) -> bool:
    """A mixture's experts as one module with one weight for all of them, (expert, out, in), whose loop and gate are
    those that transformers gives every such module (`use_experts_implementation`)."""
    weights = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    if not all(isinstance(weight, nn.Parameter) and weight.ndim == 3 for weight in weights):
        return False
    declared = hasattr(module, "_apply_gate") and hasattr(module, "is_transposed")
    return declared and bool(module.has_gate) and not module.is_transposed


class Adapter:
    """The parameters of one model: one flat block of float32 each for values and for gradients.

    A step is then one sum over the ranks and one update. A pass adds to a block of its own (`begin`), which becomes
    part of the gradients (`commit`) or is thrown away (`discard`): a pass that fails has added nothing.
    """

    def __init__(self, config: LoraConfig, targets: Sequence[Target], device: torch.device) -> None:
        self.config = config
        self.scale = config.alpha / config.rank
        self.shapes = _shapes(config.rank, targets)
        self.size = sum(math.prod(shape) for shape in self.shapes.values())
        self.flat = torch.zeros(self.size, dtype=torch.float32, device=device)
        self.pairs: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
        self._leaves = {name: nn.Parameter(view) for name, view in self.views(self.flat).items()}
        for target in targets:
            self.pairs[target.name] = (self._leaves[f"{target.name}.lora_A"], self._leaves[f"{target.name}.lora_B"])
        self.gradient: torch.Tensor | None = None
        self._staged: torch.Tensor | None = None

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """A flat block as the tensors it is made of, in the same memory."""
        parts: dict[str, torch.Tensor] = {}
        start = 0
        for name, shape in self.shapes.items():
            size = math.prod(shape)
            parts[name] = flat[start : start + size].view(shape)
            start += size
        return parts

    def initialise(self, seed: str) -> None:
        """A uniform as torch initialises a linear layer, B zero: the model starts as the base.

        Each tensor has chance of its own, from the seed and its name: the same whatever else is trained.
        """
        self.fill_new(self.flat, seed)

    def fill_new(self, flat: torch.Tensor, seed: str) -> None:
        for name, view in self.views(flat).items():
            if name.endswith("lora_B"):
                view.zero_()
                continue
            number = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8]) >> 1
            bound = 1 / math.sqrt(view.shape[-1])
            drawn = torch.rand(view.shape, generator=torch.Generator().manual_seed(number))
            view.copy_((2 * drawn - 1) * bound)

    def begin(self) -> None:
        self._staged = torch.zeros_like(self.flat)
        for name, view in self.views(self._staged).items():
            self._leaves[name].grad = view

    def is_finite(self) -> bool:
        """Whether all gradients of the pass are."""
        return self._staged is None or bool(self._staged.isfinite().all())

    def commit(self) -> None:
        assert self._staged is not None
        self.gradient = self._staged if self.gradient is None else self.gradient.add_(self._staged)
        self.discard()

    def discard(self) -> None:
        self._staged = None
        for leaf in self._leaves.values():
            leaf.grad = None


def _shapes(rank: int, targets: Sequence[Target]) -> Mapping[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for target in targets:
        many = (target.experts,) if target.experts else ()
        shapes[f"{target.name}.lora_A"] = (*many, rank, target.columns)
        shapes[f"{target.name}.lora_B"] = (*many, target.rows, rank)
    return shapes


@dataclass(frozen=True)
class Span:
    """Neighbouring tokens of a row that belong to one model."""

    adapter: Adapter | None
    length: int


class Adapters:
    """The hooks in the base, and the row they are computing. The row stays set until its backward is over: layers that
    are computed again on the way back must add the same."""

    def __init__(self, model: nn.Module) -> None:
        self.row: Sequence[Span] = ()
        self.head_row: Sequence[Span] = ()
        """Logits may be of a part of the row."""
        for name, module in model.named_modules():
            if kind_of(name) is not None and sides_of(module) is not None:
                module.register_forward_hook(self._hook(name, head=kind_of(name) == "unembed"))

    def _hook(self, name: str, *, head: bool) -> Any:
        def add(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            del module
            return self.add(name, args[0], output, self.head_row if head else self.row)

        return add

    @staticmethod
    def add(name: str, inputs: torch.Tensor, output: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
        """`output` with what each span's adapter adds for the layer `name`; tokens are the last dimension but one.

        `output` must be fresh from its layer: it is added to in place.
        """
        plan: list[_Part] = []
        matrices: list[torch.Tensor] = []
        start = 0
        for span in spans:
            if span.adapter is not None and name in span.adapter.pairs:
                plan.append(_Part(start, start + span.length, span.adapter.scale))
                matrices.extend(span.adapter.pairs[name])
            start += span.length
        if not plan:
            return output
        return _AddSpans.apply(output, inputs, plan, *matrices)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(frozen=True)
class _Part:
    start: int
    end: int
    scale: float


class _AddSpans(torch.autograd.Function):
    """B A x for each part of the rows, added to them by one multiplication: no second array as large as the output,
    on the way there or back, however many adapters share a row. Gradients of a pass go straight to where the adapter
    gathers them."""

    @staticmethod
    def forward(
        ctx: Any, output: torch.Tensor, inputs: torch.Tensor, plan: Sequence[_Part], *matrices: torch.Tensor
    ) -> torch.Tensor:
        rows = inputs.reshape(-1, inputs.shape[-1])
        flat = output.view(-1, output.shape[-1])
        narrow = []
        for part, a, b in zip(plan, matrices[::2], matrices[1::2], strict=True):
            inner = torch.mm(rows[part.start : part.end], a.to(rows.dtype).t())
            flat[part.start : part.end].addmm_(inner, b.to(rows.dtype).t(), alpha=part.scale)
            narrow.append(inner)
        ctx.plan = plan
        ctx.shape = inputs.shape
        # Not saved as tensors: what is gathered in is the gradient of the very parameter, not of a copy.
        ctx.matrices = matrices
        ctx.save_for_backward(rows, *narrow)
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        rows, *narrow = ctx.saved_tensors
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        # Rows of no adapter add nothing to what comes back.
        back = torch.zeros_like(rows)
        found: list[torch.Tensor | None] = []
        for part, a, b, inner in zip(ctx.plan, ctx.matrices[::2], ctx.matrices[1::2], narrow, strict=True):
            own, seen = grad[part.start : part.end], rows[part.start : part.end]
            through = torch.mm(own, b.to(own.dtype))
            found += [_gathered(a, through.t(), seen, part.scale), _gathered(b, own.t(), inner, part.scale)]
            back[part.start : part.end].addmm_(through, a.to(own.dtype), beta=0, alpha=part.scale)
        return grads[0], back.view(ctx.shape), None, *found


def _gathered(matrix: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scale: float) -> torch.Tensor | None:
    """The gradient of a matrix; None if it was added where the pass gathers it (`Adapter.begin`)."""
    if matrix.grad is not None and matrix.grad.dtype == left.dtype:
        matrix.grad.addmm_(left, right, alpha=scale)
        return None
    return torch.mm(left, right).mul_(scale).to(matrix.dtype)


def delta(inputs: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """The scale goes on the narrow side, where it is cheapest."""
    return linear(linear(inputs, a.to(inputs.dtype)) * scale, b.to(inputs.dtype))


def spans_between(spans: Sequence[Span], start: int, end: int) -> list[Span]:
    """The spans of a part of the row."""
    cut: list[Span] = []
    at = 0
    for span in spans:
        length = min(at + span.length, end) - max(at, start)
        if length > 0:
            cut.append(Span(span.adapter, length))
        at += span.length
    return cut
