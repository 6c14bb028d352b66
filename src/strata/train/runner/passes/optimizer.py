"""AdamW of one model: the implementation of torch, with the hyperparameters that each step brings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from strata.base.errors import Code, StrataError
from strata.train.core.ops import AdamParams, Schedule

MOMENTS: Final = ("exp_avg", "exp_avg_sq")
CLIP_EPS: Final = 1e-6
"""What torch's gradient clipping adds to a norm before it divides by it."""


@dataclass(frozen=True)
class StepResult:
    grad_norm: float
    lr: float

    @property
    def metrics(self) -> Mapping[str, float]:
        return {"grad_norm": self.grad_norm, "lr": self.lr}


class Optimizer:
    """Updates `parameters` in place: plain tensors on this rank, full ones or this rank's shards."""

    def __init__(self, parameters: Sequence[torch.Tensor], schedule: Schedule | None) -> None:
        self.parameters = [torch.nn.Parameter(parameter, requires_grad=True) for parameter in parameters]
        self.schedule = schedule
        self.steps = 0
        self._adam = torch.optim.AdamW(self.parameters, lr=0.0, fused=True)

    def step(self, gradients: Sequence[torch.Tensor], norm: float, adam: AdamParams) -> StepResult:
        """One step with the gradients summed over all ranks; `norm` is the norm of all of them."""
        check(adam)
        if not math.isfinite(norm):
            raise StrataError(Code.INVALID, f"the norm of the gradients is {norm}: they were discarded")
        if adam.grad_clip_norm > 0 and norm + CLIP_EPS > adam.grad_clip_norm:
            for gradient in gradients:
                gradient.mul_(adam.grad_clip_norm / (norm + CLIP_EPS))
        factor = self.schedule.factor(self.steps + 1) if self.schedule else 1.0
        lr = adam.learning_rate * factor
        for group in self._adam.param_groups:
            group.update(lr=lr, betas=(adam.beta1, adam.beta2), eps=adam.eps, weight_decay=adam.weight_decay)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        self.steps += 1
        return StepResult(norm, lr)

    def moments(self) -> list[dict[str, torch.Tensor]]:
        """The moments of each parameter, by name; zeros before the first step."""
        return [
            {name: state[name] if state else torch.zeros_like(parameter.data) for name in MOMENTS}
            for parameter, state in ((parameter, self._adam.state[parameter]) for parameter in self.parameters)
        ]

    def restore(self, moments: Sequence[Mapping[str, torch.Tensor]], steps: int) -> None:
        self.steps = steps
        self._adam.state.clear()
        if not steps:
            return
        for parameter, restored in zip(self.parameters, moments, strict=True):
            self._adam.state[parameter] = {
                "step": torch.tensor(float(steps), device=parameter.device),
                **{name: restored[name].to(parameter.device, copy=True) for name in MOMENTS},
            }

    def tensors(self) -> list[torch.Tensor]:
        """The optimizer state, without the parameters."""
        return [value for state in self._adam.state.values() for value in state.values()]


def check(adam: AdamParams) -> None:
    numbers = (adam.learning_rate, adam.beta1, adam.beta2, adam.eps, adam.weight_decay, adam.grad_clip_norm)
    if not all(math.isfinite(number) and number >= 0 for number in numbers) or max(adam.beta1, adam.beta2) >= 1:
        raise StrataError(
            Code.INVALID, "the hyperparameters of a step must be finite and not negative, and the betas below 1"
        )
