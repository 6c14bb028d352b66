"""The optimizer steps AdamW and Muon: checks of hyperparameters, gradient clipping, norm, moments."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from strata.base.errors import Code, StrataError
from strata.train.core.model_options import AdamParams, MuonParams, OptimizerName, Schedule

MOMENTS: Final[Mapping[OptimizerName, Sequence[str]]] = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "muon": ("momentum_buffer",),
}
"""The moments as torch names them."""
CLIP_EPS: Final = 1e-6
"""What torch's gradient clipping adds to a norm before it divides by it."""

SUMMED: Final = 4096
"""So many squares are summed in the tensor's own precision: sums of more lose digits."""

StepParams = AdamParams | MuonParams
Moments = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class StepResult:
    grad_norm: float
    lr: float

    @property
    def metrics(self) -> Mapping[str, float]:
        return {"grad_norm": self.grad_norm, "lr": self.lr}


def sum_squares(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of the squares of all numbers, in float64, without a copy of them in it. At least one tensor."""
    if tensors[0].is_cuda:
        # The kernel converts the numbers as it reads them; that of the processor copies them before.
        return torch.stack(torch._foreach_norm(list(tensors), 2, torch.float64)).square().sum()
    flat = [tensor.reshape(-1) for tensor in tensors]
    whole = [len(each) // SUMMED * SUMMED for each in flat]
    norms = [
        torch.linalg.vector_norm(each[:end].view(-1, SUMMED), dim=1)
        for each, end in zip(flat, whole, strict=True)
        if end
    ]
    rest = torch._foreach_norm([each[end:] for each, end in zip(flat, whole, strict=True)], 2)
    return torch.cat([*norms, torch.stack(rest)]).double().square().sum()


def _as_one(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    return [tensor]


class Optimizer:
    """Updates `parameters` in place: plain tensors on this rank, full ones or this rank's shards.

    AdamW takes each as it is. Muon steps on whole matrices: `matrices` has for each parameter a function that returns
    those of it, of its gradient or of its momentum, as views of the same memory.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        schedule: Schedule | None,
        name: OptimizerName = "adamw",
        matrices: Sequence[Callable[[torch.Tensor], Sequence[torch.Tensor]]] = (),
    ) -> None:
        self.parameters = [torch.nn.Parameter(parameter, requires_grad=True) for parameter in parameters]
        self.schedule = schedule
        self.name: OptimizerName = name
        self.moment_names = MOMENTS[name]
        self.steps = 0
        self._matrices = [_as_one] * len(parameters) if name == "adamw" else matrices
        self._stepped = [
            [torch.nn.Parameter(each) for each in matrices_of(one.detach())]
            for matrices_of, one in zip(self._matrices, self.parameters, strict=True)
        ]
        # Of a stage without any: torch makes no optimizer of nothing, and makes no step without a gradient.
        flat = [each for stepped in self._stepped for each in stepped] or [torch.nn.Parameter(torch.zeros(0, 0))]
        self._torch: torch.optim.Optimizer = (
            torch.optim.AdamW(flat, lr=0.0, fused=True) if name == "adamw" else torch.optim.Muon(flat, lr=0.0)
        )
        self._moments: list[Moments] = []

    def step(self, gradients: Sequence[torch.Tensor], norm: float, params: StepParams) -> StepResult:
        """One step with the gradients summed over all ranks; `norm` is the norm of all of them."""
        settings = step_settings(self.name, params)
        if not math.isfinite(norm):
            raise StrataError(Code.INVALID, f"the norm of the gradients is {norm}: they were discarded")
        if params.grad_clip_norm > 0 and norm + CLIP_EPS > params.grad_clip_norm:
            torch._foreach_mul_(list(gradients), params.grad_clip_norm / (norm + CLIP_EPS))
        factor = self.schedule.factor(self.steps + 1) if self.schedule else 1.0
        lr = params.learning_rate * factor
        for group in self._torch.param_groups:
            group.update(lr=lr, **settings)
        if not self._moments:
            self._install(self.moments(), 0)
        for stepped, matrices, gradient in zip(self._stepped, self._matrices, gradients, strict=True):
            for parameter, own in zip(stepped, matrices(gradient), strict=True):
                parameter.grad = own
        self._torch.step()
        self._torch.zero_grad(set_to_none=True)
        self.steps += 1
        return StepResult(norm, lr)

    def moments(self) -> list[Moments]:
        """The moments of each parameter, by name; zeros before the first step."""
        return self._moments or [
            {name: torch.zeros_like(parameter.data) for name in self.moment_names} for parameter in self.parameters
        ]

    def restore(self, moments: Sequence[Moments], steps: int) -> None:
        self.steps = steps
        self._moments = []
        self._torch.state.clear()
        if steps:
            copies: list[Moments] = [
                {name: restored[name].to(parameter.device, copy=True) for name in self.moment_names}
                for parameter, restored in zip(self.parameters, moments, strict=True)
            ]
            self._install(copies, steps)

    def _install(self, moments: list[Moments], steps: int) -> None:
        """Let torch continue with these, in the memory that they have."""
        self._moments = moments
        for stepped, matrices, own in zip(self._stepped, self._matrices, moments, strict=True):
            views = {name: matrices(value) for name, value in own.items()}
            for number, parameter in enumerate(stepped):
                state = {name: of_all[number] for name, of_all in views.items()}
                if self.name == "adamw":
                    # Filled there: copies from the host, one for each parameter, would be waited for.
                    state["step"] = torch.full((), float(steps), device=parameter.device)
                self._torch.state[parameter] = state

    def tensors(self) -> list[torch.Tensor]:
        """The optimizer state, without the parameters."""
        return [value for state in self._torch.state.values() for value in state.values()]


def step_settings(name: OptimizerName, params: StepParams) -> Mapping[str, object]:
    """Returns the settings as torch's optimizer takes them; INVALID if they are of another one, or no numbers for a
    step."""
    shares: tuple[float, ...]
    if isinstance(params, AdamParams):
        of, shares, amounts = "adamw", (params.beta1, params.beta2), (params.eps,)
        settings: dict[str, object] = {"betas": shares, "eps": params.eps}
    else:
        of, shares, amounts = "muon", (params.momentum,), (float(params.ns_steps),)
        settings = {
            "momentum": params.momentum,
            "nesterov": params.nesterov,
            "ns_steps": params.ns_steps,
            "adjust_lr_fn": params.adjust_lr_fn,
        }
    if of != name:
        raise StrataError(Code.INVALID, f"the model was created with {name}, and these are hyperparameters of {of}")
    numbers = (params.learning_rate, params.weight_decay, params.grad_clip_norm, *shares, *amounts)
    if not all(math.isfinite(number) and number >= 0 for number in numbers) or max(shares) >= 1:
        raise StrataError(
            Code.INVALID, "the hyperparameters of a step must be finite and not negative, and the betas below 1"
        )
    return {**settings, "weight_decay": params.weight_decay}
