"""From a step of the optimizer to the first token of the weights it made: `python -m bench publish`.

Ours goes through the whole server, as `strata serve` starts it, with two ranks: the step is handed in over HTTP, behind
it a sampler of the model (`save_weights_for_sampler` without a name), and when that is there, a request for one token,
until it is heard. Gradients are there before the clock starts.

Bare has no server, no second rank and no other process: the model as transformers loads it with adapters by PEFT,
torch's AdamW, one step, a copy of the adapter in memory, and `generate` of one token. Nothing that
publishes weights can do less.

- `publish.4`, `publish.64`: all of it, with adapters of these ranks.
- `publish.copy.4`, `publish.copy.64`: the sampler alone, beside the copy alone. What it costs beyond an operation that
  does nothing (`op.latency` of `bench train`) is to grow with the adapter, not with the model.

All are latencies; the ratio is bare by ours, so higher is better. Nobody asked for a goal.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Final

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from bench.interleave import interleave
from bench.report import Report
from bench.train.bare import LAYERS
from bench.train.processes import served
from bench.train.protocol import BETAS, EPS, LORA_ALPHA, MODEL, RATE, Server, Tokens
from bench.train.wire import Wire
from strata.train.runner.model.tiny import TinyModel, make

RANKS: Final = (4, 64)
"""Of the adapters."""
PROMPT: Final = 32
SMALL: Final = TinyModel(layers=4, hidden=256, vocabulary=2048, context=64)
LARGE: Final = TinyModel(layers=11, hidden=640, vocabulary=8192, context=64)
SETTINGS: Final = """
[server]
port = 0
data = "{folder}/d"
log_level = "warning"
[model]
path = "{folder}/model"
name = "{name}"
max_lora_rank = {most}
[ranks]
nproc = 2
"""


@dataclass(frozen=True)
class Turns:
    rounds: int
    times: int
    """In a round; its figure is the middle one."""


QUICK: Final = Turns(rounds=6, times=5)
LONG: Final = Turns(rounds=20, times=10)


class Bare:
    def __init__(self, path: Path, rank: int) -> None:
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32, local_files_only=True)
        adapters = LoraConfig(r=rank, lora_alpha=LORA_ALPHA, lora_dropout=0.0, target_modules=list(LAYERS))
        self._model: Any = get_peft_model(model, adapters)
        self._trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._adam = torch.optim.AdamW(self._trained, lr=RATE, betas=BETAS, eps=EPS, weight_decay=0.0, fused=True)
        self.kept: list[torch.Tensor] = []

    @property
    def adapter_bytes(self) -> int:
        return sum(parameter.numel() * parameter.element_size() for parameter in self._trained)

    def backward(self, row: torch.Tensor) -> None:
        logits = self._model(input_ids=row[:, :-1], use_cache=False).logits
        cross_entropy(logits.flatten(0, 1), row[:, 1:].flatten(), reduction="sum").backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)

    def copy(self) -> None:
        self.kept = [parameter.detach().clone() for parameter in self._trained]

    @torch.inference_mode()
    def token(self, prompt: torch.Tensor) -> None:
        found = self._model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=1,
            do_sample=True,
            top_k=0,
            eos_token_id=None,
        )
        assert found.shape[1] == prompt.shape[1] + 1


async def run(report: Report, *, quick: bool) -> None:
    turns, shape = (QUICK, SMALL) if quick else (LONG, LARGE)
    threads = torch.get_num_threads()
    # As a rank has it.
    torch.set_num_threads(1)
    # A short path: Unix sockets lie below it.
    folder = Path(tempfile.mkdtemp(prefix="strata-bench-"))
    try:
        parameters = await asyncio.to_thread(make, folder / "model", shape)
        report.progress(f"the ranks start, {parameters / 1e6:.1f} M parameters")
        settings = SETTINGS.format(folder=folder, name=MODEL, most=max(RANKS))
        async with served(folder, settings) as server:
            for rank in RANKS:
                await cases(report, server, Bare(folder / "model", rank), rank, turns)
    finally:
        torch.set_num_threads(threads)
        await asyncio.to_thread(shutil.rmtree, folder)


async def cases(report: Report, server: Server, bare: Bare, rank: int, turns: Turns) -> None:
    row: Tokens = np.random.default_rng(rank).integers(4, 256, (1, PROMPT + 1)).astype(np.int32)
    prompt = [int(token) for token in row[0, :-1]]
    row_there, prompt_there = torch.from_numpy(row).long(), torch.tensor([prompt])
    with closing(await asyncio.to_thread(Wire, server, "lora", rank)) as wire:

        def ours_once() -> float:
            wire.loss(wire.forward_backward(row))
            started = perf_counter()
            step = wire.optim_step()
            sampler = wire.result(wire.publish())["sampling_session_id"]
            (sequence,) = wire.result(wire.sample(sampler, prompt, 1))["sequences"]
            took_s = perf_counter() - started
            assert len(sequence["tokens"]) == 1
            assert "error" not in wire.result(step)
            return took_s

        def bare_once() -> float:
            bare.backward(row_there)
            started = perf_counter()
            bare.step()
            bare.copy()
            bare.token(prompt_there)
            return perf_counter() - started

        def ours_copy() -> float:
            started = perf_counter()
            assert "error" not in wire.result(wire.publish())
            return perf_counter() - started

        def bare_copy() -> float:
            started = perf_counter()
            bare.copy()
            return perf_counter() - started

        note = f"adapter of {bare.adapter_bytes / 1e6:.1f} MB, 2 ranks beside 1 process"
        for case, ours, other in (("publish", ours_once, bare_once), ("publish.copy", ours_copy, bare_copy)):
            report.progress(f"{case}, adapters of rank {rank}")

            async def measured(once: Callable[[], float] = ours) -> float:
                return await asyncio.to_thread(_middle_ms, once, turns.times)

            async def measured_bare(once: Callable[[], float] = other) -> float:
                return await asyncio.to_thread(_middle_ms, once, turns.times)

            found = await interleave(measured, measured_bare, turns.rounds, better="lower")
            report.add(f"{case}.{rank}", "ms", found, note=note)


def _middle_ms(once: Callable[[], float], times: int) -> float:
    return median(once() for _ in range(times)) * 1e3
