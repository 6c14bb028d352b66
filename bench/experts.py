"""The experts of a mixture, forward and backward on CPU: `python -m bench experts`.

One layer of 64 experts, all of its weights trained. Ours is the grouped matrix multiplication of the training server.

- `experts.loop`: bare is transformers' own module, which takes one expert's matrix out of the fused weight at a time.
  Each of these has a gradient as large as the whole weight.
- `experts.unbind`: bare is the same loop over the matrices of the fused weight that were unbound once.

The processor time of this process is measured, because others use the machine; torch has one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from time import process_time
from typing import Any, Final

import torch
from torch.nn.functional import linear
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from bench.interleave import interleave
from bench.report import Report
from strata.train.runner.experts import group_experts
from strata.train.runner.lora.hooks import Adapters

EXPERTS: Final = 64
CHOSEN: Final = 8
"""Experts of a token."""
HIDDEN: Final = 256
INNER: Final = 256
TOKENS: Final = 512
CLOSE: Final = 1e-5
GOAL: Final = 1.0

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def experts() -> Any:
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=EXPERTS, num_experts_per_tok=CHOSEN
    )
    config._experts_implementation = "eager"
    module = Qwen3MoeExperts(config)  # type: ignore[no-untyped-call]
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return module


def unbound(module: Any) -> Forward:
    def forward(hidden: torch.Tensor, routed: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(hidden)
        matrices = zip(module.gate_up_proj.unbind(), module.down_proj.unbind(), strict=True)
        for expert, (first, second) in enumerate(matrices):
            token, which = torch.where(routed == expert)
            gate, up = linear(hidden[token], first).chunk(2, dim=-1)
            output = linear(module.act_fn(gate) * up, second)
            total.index_add_(0, token, output * weights[token, which, None])
        return total

    return forward


class Layer:
    """One way to compute the layer, with its weights."""

    def __init__(self, way: Callable[[Any], Forward]) -> None:
        self._module = experts()
        self._forward = way(self._module)
        generator = torch.Generator().manual_seed(1)
        self._hidden = torch.randn(TOKENS, HIDDEN, generator=generator).requires_grad_()
        self._weights, self._routed = torch.rand(TOKENS, EXPERTS, generator=generator).topk(CHOSEN)

    def step(self) -> list[torch.Tensor]:
        """The gradients of weights and inputs."""
        output = self._forward(self._hidden, self._routed, self._weights)
        leaves = [self._hidden, *self._module.parameters()]
        return list(torch.autograd.grad(output.square().sum(), leaves))

    async def measure(self) -> float:
        started = process_time()
        self.step()
        return (process_time() - started) * 1e3


def grouped(module: Any) -> Forward:
    group_experts(module, Adapters())
    return module  # type: ignore[no-any-return]


async def run(report: Report, *, quick: bool) -> None:
    torch.set_num_threads(1)
    ours, others = Layer(grouped), {"loop": Layer(lambda module: module), "unbind": Layer(unbound)}
    note = f"{EXPERTS} experts, {CHOSEN} of them for each of {TOKENS} tokens, {HIDDEN} to {INNER}"
    for name, other in others.items():
        for computed, expected in zip(ours.step(), other.step(), strict=True):
            if float((computed - expected).abs().max()) > CLOSE * float(expected.abs().max()):
                raise RuntimeError(f"the gradients of {name} are others")
        report.progress(f"{name}, {note}")
        found = await interleave(ours.measure, other.measure, 5 if quick else 20, better="lower")
        report.add(name, "ms of processor time", found, goal=GOAL, note=note)
