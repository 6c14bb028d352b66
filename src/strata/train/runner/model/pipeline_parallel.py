"""Pipeline parallelism: the order of forward and backward steps of rows, which layers a stage computes, and sends and
receives between stages. Sizes of stages are in `strata.train.parallel`.

A stage runs the family's own decoder, in which the layers of other stages return what they get. So the first stage
begins with tokens, each other one with the hidden states that it receives, and the last one has the head and the
losses. Hidden states travel forward and their gradients back as part of the computation: a stage that is called with a
row receives and sends what belongs to it, and so does the backward pass of that row. In which order a stage calls its
rows (`plan_steps`) is the schedule.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from strata.base.errors import Code, StrataError
from strata.train.parallel import ParallelSettings
from strata.train.runner.collectives import ALONE, ShareGroup


class RowStep(NamedTuple):
    """The forward or the backward pass of one row."""

    row: int
    is_backward: bool


def plan_steps(stages: int, stage: int, rows: int) -> list[RowStep]:
    """The order in which one of so many stages computes rows (1F1B): each is computed backward as soon as it can be, so
    that a stage has the activations of at most `stages` rows. A single stage computes row by row."""
    ahead = stages - stage - 1
    steps = [RowStep(row, is_backward=False) for row in range(min(ahead, rows))]
    for row in range(rows):
        if row + ahead < rows:
            steps.append(RowStep(row + ahead, is_backward=False))
        steps.append(RowStep(row, is_backward=True))
    return steps


class PipelineStage:
    """The stage of this rank, and its peers: the ranks at the same place in the other stages. All ranks construct it
    together, and call the model with the same rows as their peers, in an order that `plan_steps` gives. A model that no
    pipeline divides has one stage, without peers."""

    def __init__(self, parallel: ParallelSettings, ranks: ShareGroup, dtype: torch.dtype) -> None:
        size = parallel.stage_ranks(ranks.size)
        self._parallel = parallel
        self.number, place = divmod(ranks.rank, size)
        self.is_first = self.number == 0
        self.is_last = self.number == parallel.pipeline - 1
        """Whether this stage computes log probabilities, and not only what the next one needs for them."""
        self.is_only = parallel.pipeline == 1
        self.shares = ranks
        """The ranks of this stage."""
        self._elsewhere: Collection[str] = ()
        if self.is_only:
            return
        self.previous, self.following = ranks.rank - size, ranks.rank + size
        self._ends = place, ranks.size - size + place
        peers = [list(range(first, ranks.size, size)) for first in range(size)]
        # Hidden states and gradients cross each other: in one group, a send could wait for the receive behind it.
        self.states, self.gradients = _own_group(peers), _own_group(peers)
        stages = [list(range(first, first + size)) for first in range(0, ranks.size, size)]
        self.shares = ShareGroup(place, size, _own_group(stages)) if size > 1 else ALONE
        self._dtype = dtype
        self._sending: dict[dist.ProcessGroup, tuple[dist.Work | None, torch.Tensor]] = {}

    def cut(self, lm: PreTrainedModel, decoder: str) -> None:
        """Leave the modules of this stage, by their names in the model. The first and the last stage both have a head
        that is tied to the embedding."""
        if self.is_only:
            return
        model: Any = lm.get_submodule(decoder)
        own = self._parallel.stage_layers(self.number, len(model.layers))
        output: nn.Module = lm.get_output_embeddings()  # type: ignore[no-untyped-call]
        head = next(name for name, module in lm.named_modules() if module is output)
        is_tied = lm.get_parameter(f"{head}.weight") is model.embed_tokens.weight
        has_tied = is_tied and (self.is_first or self.is_last)
        kept = {
            **{f"{decoder}.layers.{number}": number in own for number in range(len(model.layers))},
            f"{decoder}.embed_tokens": self.is_first or has_tied,
            f"{decoder}.norm": self.is_last,
            head: self.is_last or has_tied,
        }
        dropped = [name for name, is_kept in kept.items() if not is_kept]
        self._elsewhere = dropped if self.is_last else {*dropped, head}
        for name in dropped:
            lm.set_submodule(name, _PassThrough())
        if not has_tied:
            lm.all_tied_weights_keys = {}
        # transformers would report that the files have them.
        unread = (rf"^{re.escape(name)}\." for name in dropped)
        lm._keys_to_ignore_on_load_unexpected = {*(lm._keys_to_ignore_on_load_unexpected or ()), *unread}

    def computes(self, name: str) -> bool:
        """Says whether this stage computes a module, by its name in the model. It has been cut."""
        return not any(f"{name}.".startswith(f"{other}.") for other in self._elsewhere)

    def receive(self, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """The hidden states of a row from the previous stage. Their gradient goes back to it."""
        # Of an input that needs a gradient: only then is the backward pass called.
        anchor = torch.empty(0, dtype=self._dtype, device=device, requires_grad=True)
        return _Receive.apply(anchor, shape, self)  # type: ignore[no-any-return, no-untyped-call]

    def send(self, states: torch.Tensor, count: int) -> torch.Tensor:
        """Send hidden states to the next stage. Returns zeros, as many as the row has targets: their backward pass,
        whatever their gradient is, takes that of the hidden states from the next stage."""
        if states.dtype != self._dtype:
            raise StrataError(Code.UNSUPPORTED, f"its hidden states are {states.dtype} in {self._dtype} arithmetic")
        return _Send.apply(states, count, self)  # type: ignore[no-any-return, no-untyped-call]

    def share(self, computed: torch.Tensor) -> torch.Tensor:
        """Returns what the last stage computed, on all stages. The others give a tensor of the same shape and dtype."""
        if self.is_only:
            return computed
        shared = computed.detach().contiguous()
        dist.broadcast(shared, self._ends[1], group=self.states)
        return shared

    def tied_weights(self, lm: PreTrainedModel) -> list[str]:
        """The weights that the first and the last stage both have: those with two names."""
        names: dict[int, list[str]] = {}
        for name, weight in lm.named_parameters(remove_duplicate=False):
            names.setdefault(id(weight), []).append(name)
        return [own[0] for own in names.values() if len(own) > 1 and not self.is_only]

    def sum_tied(self, gradient: torch.Tensor) -> None:
        """Sum the gradient of such a weight, in place, over the two stages that have it."""
        first, last = self._ends
        if self.is_last:
            dist.send(gradient, first, group=self.gradients)
            dist.recv(gradient, first, group=self.gradients)
        else:
            other = torch.empty_like(gradient)
            dist.recv(other, last, group=self.gradients)
            dist.send(gradient.add_(other), last, group=self.gradients)

    def start_send(self, tensor: torch.Tensor, to: int, group: dist.ProcessGroup) -> None:
        """The memory of what is sent stays until the next send in the same direction."""
        before, _ = self._sending.get(group, (None, tensor))
        if before is not None:
            before.wait()
        self._sending[group] = dist.isend(tensor, to, group=group), tensor


def _own_group(peers: list[list[int]]) -> dist.ProcessGroup:
    own, _ = dist.new_subgroups_by_enumeration(peers)  # type: ignore[no-untyped-call]
    assert isinstance(own, dist.ProcessGroup)
    return own


class _PassThrough(nn.Module):
    """Stands in the place of a module that another stage has."""

    def forward(self, states: torch.Tensor, **options: Any) -> torch.Tensor:
        del options
        return states


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, shape: tuple[int, ...], stage: PipelineStage) -> torch.Tensor:
        ctx.stage = stage
        states = anchor.new_empty(shape)
        dist.recv(states, stage.previous, group=stage.states)
        return states

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None, None]:
        stage: PipelineStage = ctx.stage
        stage.start_send(grads[0].contiguous(), stage.previous, stage.gradients)
        return None, None, None


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, count: int, stage: PipelineStage) -> torch.Tensor:
        ctx.stage, ctx.shape, ctx.dtype = stage, states.shape, states.dtype
        stage.start_send(states.detach().contiguous(), stage.following, stage.states)
        return torch.zeros(count, dtype=torch.promote_types(states.dtype, torch.float32), device=states.device)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        stage: PipelineStage = ctx.stage
        gradient = torch.empty(ctx.shape, dtype=ctx.dtype, device=grads[0].device)
        dist.recv(gradient, stage.following, group=stage.gradients)
        return gradient, None, None
