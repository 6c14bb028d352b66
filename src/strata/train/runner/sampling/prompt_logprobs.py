"""What the model says of a prompt: how likely its tokens were, or others in their places, and what it would say there.

All of it is the model's own, at temperature 1, but for the tokens that are drawn: those at the request's temperature.
"""

from __future__ import annotations

import msgspec
import numpy as np
import torch

from strata.train.core.sampling import (
    MISSING_LOGPROB,
    Draws,
    Layout,
    Sample,
    TargetLogprobs,
    Targets,
    TopLogprobs,
)
from strata.train.runner.lora.adapter import Span
from strata.train.runner.sampling.inference_model import InferenceModel
from strata.train.runner.sampling.sampling_ops import SeededRng, draw, is_greedy
from strata.train.runner.sampling.sequences import Request, chance_name, tokens_from, top_logprobs, top_of


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    logprobs: bytes | None = None
    top: TopLogprobs | None = None
    targets: TargetLogprobs | None = None
    draws: Draws | None = None


def prompt_logprobs_of(twin: InferenceModel, request: Request, hidden: torch.Tensor) -> PromptLogprobs:
    """From the hidden states of the prompt. The first token has none before it that could speak of it."""
    sample = request.sample
    scored = _Scored(sample) if sample.prompt_logprobs or sample.topk_prompt_logprobs else None
    targets = _Asked(sample.targets) if sample.targets is not None else None
    draws = _Drawn(sample) if sample.prompt_draws else None
    whole = targets is not None or draws is not None
    first = 0 if whole or scored is None else scored.first
    step = max(1, twin.logits_bytes // (4 * twin.vocabulary))
    for start in range(first, len(hidden) - 1, step):
        end = min(start + step, len(hidden) - 1)
        logits = twin.logits(hidden[start:end], [Span(request.adapter, end - start)])
        found = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
        if scored is not None:
            scored.take(found, request.prompt[start + 1 : end + 1], start)
        if targets is not None:
            targets.take(found, start)
        if draws is not None:
            draws.take(found)
    return PromptLogprobs(
        scored.logprobs() if scored is not None and sample.prompt_logprobs else None,
        scored.top() if scored is not None and sample.topk_prompt_logprobs else None,
        targets.result() if targets is not None else None,
        draws.result() if draws is not None else None,
    )


class _Scored:
    """The tokens of the prompt themselves, and the likeliest in their places. `first` is the first row that counts."""

    def __init__(self, sample: Sample) -> None:
        last = sample.prompt_logprobs_last_n
        self.first = 0 if last is None else sample.length - 1 - last
        self._k = sample.topk_prompt_logprobs
        none = 1 + self.first
        self._logprobs = [torch.full((none,), torch.nan)]
        self._tokens = [torch.zeros((none, self._k), dtype=torch.int32)]
        self._values = [torch.full((none, self._k), MISSING_LOGPROB)]

    def take(self, found: torch.Tensor, tokens: torch.Tensor, start: int) -> None:
        before = max(self.first - start, 0)
        found, tokens = found[before:], tokens[before:]
        self._logprobs.append(found.gather(1, tokens[:, None])[:, 0].cpu())
        if self._k:
            top = top_of(found, self._k)
            self._tokens.append(top[0])
            self._values.append(top[1])

    def logprobs(self) -> bytes:
        return torch.cat(self._logprobs).numpy().tobytes()

    def top(self) -> TopLogprobs:
        return top_logprobs(torch.cat(self._tokens), torch.cat(self._values))


class _Asked:
    """The tokens that the client named."""

    def __init__(self, targets: Targets) -> None:
        self._layout = targets.layout
        self._tokens = tokens_from(targets.tokens)
        self._row_starts = rows_begin(targets.layout)
        self._found = torch.zeros(len(self._tokens))

    def take(self, found: torch.Tensor, start: int) -> None:
        begin = self._row_starts[start : start + len(found) + 1]
        here = slice(int(begin[0]), int(begin[-1]))
        rows = torch.arange(len(found)).repeat_interleave(begin.diff())
        tokens = self._tokens[here]
        values = found[rows.to(found.device), tokens.clamp(min=0).to(found.device)].cpu()
        self._found[here] = values.masked_fill(tokens < 0, 0.0)

    def result(self) -> TargetLogprobs:
        return TargetLogprobs(self._found.numpy().tobytes(), self._layout)


def rows_begin(layout: Layout) -> torch.Tensor:
    """Where each row begins among the values, and the end."""
    if layout.crow is not None:
        return torch.from_numpy(np.frombuffer(layout.crow, "<i8").copy())
    rows, columns = layout.shape
    return torch.arange(rows + 1) * columns


class _Drawn:
    def __init__(self, sample: Sample) -> None:
        self._k = sample.prompt_draws
        self._temperature = sample.params.temperature
        self._greedy = is_greedy(sample.params)
        # Its own: how many are drawn here must not change what is sampled after the prompt.
        self._chance = SeededRng(f"{chance_name(sample)}/prompt")
        self._tokens: list[torch.Tensor] = [torch.zeros((0, self._k), dtype=torch.int32)]
        self._values: list[torch.Tensor] = [torch.zeros((0, self._k))]

    def take(self, found: torch.Tensor) -> None:
        if self._greedy:
            tokens = found.argmax(-1, keepdim=True).expand(-1, self._k)
        else:
            numbers = [[self._chance.next() for _ in range(self._k)] for _ in range(len(found))]
            uniform = torch.tensor(numbers, dtype=torch.float64, device=found.device)
            tokens = draw(torch.log_softmax(found / self._temperature, dim=-1), uniform)
        self._tokens.append(tokens.to("cpu", torch.int32))
        self._values.append(found.gather(1, tokens).cpu())

    def result(self) -> Draws:
        tokens, values = torch.cat(self._tokens), torch.cat(self._values)
        return Draws(tokens.numpy().tobytes(), values.numpy().tobytes(), self._k, len(tokens))
