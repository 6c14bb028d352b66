"""Computes log probabilities of a prompt: its tokens, the likeliest ones, tokens that a client names, and draws.

All of them are the model's own, at temperature 1, except that the draws are made at the request's temperature.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import numpy as np
import torch

from strata.train.core.sampling import (
    MISSING_LOGPROB,
    Draws,
    Layout,
    SampleOperation,
    TargetLogprobs,
    Targets,
    TopLogprobs,
)
from strata.train.runner.lora.hooks import Span
from strata.train.runner.sampling.inference_model import InferenceModel
from strata.train.runner.sampling.sampling_ops import SeededRng, draw
from strata.train.runner.sampling.sequences import SequenceGroup, rng_name, tokens_from, top_logprobs, top_of


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    logprobs: bytes | None = None
    top: TopLogprobs | None = None
    targets: TargetLogprobs | None = None
    draws: Draws | None = None


def compute_prompt_logprobs(model: InferenceModel, group: SequenceGroup, hidden: torch.Tensor) -> PromptLogprobs:
    """Computes them from the hidden states of the prompt. The first token has no predecessor, so it has no log
    probability."""
    all_scores = _wanted_scores(group)
    first = min((scores.first for scores in all_scores), default=0)
    step = max(1, model.logits_bytes // (4 * model.vocabulary))
    for start in range(first, len(hidden) - 1, step):
        end = min(start + step, len(hidden) - 1)
        logits = model.logits(hidden[start:end], [Span(group.adapter, end - start)])
        logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
        for scores in all_scores:
            scores.append(logprobs, start)
    result = PromptLogprobs()
    for scores in all_scores:
        result = scores.add_to(result)
    return result


class _Scores(Protocol):
    """One kind of log probabilities, collected chunk by chunk."""

    @property
    def first(self) -> int:
        """The first row that it needs."""
        ...

    def append(self, logprobs: torch.Tensor, start: int) -> None:
        """Take what it needs of the distributions after the tokens of the prompt from `start` on."""
        ...

    def add_to(self, result: PromptLogprobs) -> PromptLogprobs: ...


def _wanted_scores(group: SequenceGroup) -> list[_Scores]:
    sample = group.sample
    wanted: list[_Scores] = []
    if sample.prompt_logprobs or sample.topk_prompt_logprobs:
        wanted.append(_PromptScores(sample, group.prompt))
    if sample.targets is not None:
        wanted.append(_TargetScores(sample.targets))
    if sample.prompt_draws:
        wanted.append(_PromptDraws(sample))
    return wanted


class _PromptScores:
    """Log probabilities of the prompt's own tokens, and of the likeliest at each position, from the row `first` on."""

    def __init__(self, sample: SampleOperation, prompt: torch.Tensor) -> None:
        last = sample.prompt_logprobs_last_n
        self.first = 0 if last is None else sample.length - 1 - last
        self._prompt = prompt
        self._wants_own = sample.prompt_logprobs
        self._k = sample.topk_prompt_logprobs
        unscored = 1 + self.first
        self._logprobs = [torch.full((unscored,), torch.nan)]
        self._tokens = [torch.zeros((unscored, self._k), dtype=torch.int32)]
        self._values = [torch.full((unscored, self._k), MISSING_LOGPROB)]

    def append(self, logprobs: torch.Tensor, start: int) -> None:
        end = start + len(logprobs)
        logprobs = logprobs[max(self.first - start, 0) :]
        tokens = self._prompt[end + 1 - len(logprobs) : end + 1]
        self._logprobs.append(logprobs.gather(1, tokens[:, None])[:, 0].cpu())
        if self._k:
            top = top_of(logprobs, self._k)
            self._tokens.append(top[0])
            self._values.append(top[1])

    def add_to(self, result: PromptLogprobs) -> PromptLogprobs:
        own = torch.cat(self._logprobs).numpy().tobytes() if self._wants_own else None
        top = top_logprobs(torch.cat(self._tokens), torch.cat(self._values)) if self._k else None
        return msgspec.structs.replace(result, logprobs=own, top=top)


class _TargetScores:
    """Log probabilities of the tokens that the client named."""

    first = 0

    def __init__(self, targets: Targets) -> None:
        self._layout = targets.layout
        self._tokens = tokens_from(targets.tokens)
        self._row_starts = row_starts(targets.layout)
        self._logprobs = torch.zeros(len(self._tokens))

    def append(self, logprobs: torch.Tensor, start: int) -> None:
        starts = self._row_starts[start : start + len(logprobs) + 1]
        chunk = slice(int(starts[0]), int(starts[-1]))
        rows = torch.arange(len(logprobs)).repeat_interleave(starts.diff())
        tokens = self._tokens[chunk]
        values = logprobs[rows.to(logprobs.device), tokens.clamp(min=0).to(logprobs.device)].cpu()
        self._logprobs[chunk] = values.masked_fill(tokens < 0, 0.0)

    def add_to(self, result: PromptLogprobs) -> PromptLogprobs:
        scored = TargetLogprobs(self._logprobs.numpy().tobytes(), self._layout)
        return msgspec.structs.replace(result, targets=scored)


def row_starts(layout: Layout) -> torch.Tensor:
    """The index of each row's first value, and the number of values at the end."""
    if layout.crow is not None:
        return torch.from_numpy(np.frombuffer(layout.crow, "<i8").copy())
    rows, columns = layout.shape
    return torch.arange(rows + 1) * columns


class _PromptDraws:
    """Alternative tokens drawn at each position of the prompt."""

    first = 0

    def __init__(self, sample: SampleOperation) -> None:
        self._k = sample.prompt_draws
        self._temperature = sample.params.temperature
        self._greedy = sample.params.is_greedy
        # A generator of its own: the number of draws must not change what is sampled after the prompt.
        self._rng = SeededRng(f"{rng_name(sample)}/prompt")
        self._tokens: list[torch.Tensor] = [torch.zeros((0, self._k), dtype=torch.int32)]
        self._values: list[torch.Tensor] = [torch.zeros((0, self._k))]

    def append(self, logprobs: torch.Tensor, start: int) -> None:
        del start
        if self._greedy:
            tokens = logprobs.argmax(-1, keepdim=True).expand(-1, self._k)
        else:
            numbers = [[self._rng.next() for _ in range(self._k)] for _ in range(len(logprobs))]
            uniform = torch.tensor(numbers, dtype=torch.float64, device=logprobs.device)
            tokens = draw(torch.log_softmax(logprobs / self._temperature, dim=-1), uniform)
        self._tokens.append(tokens.to("cpu", torch.int32))
        self._values.append(logprobs.gather(1, tokens).cpu())

    def add_to(self, result: PromptLogprobs) -> PromptLogprobs:
        tokens, values = torch.cat(self._tokens), torch.cat(self._values)
        draws = Draws(tokens.numpy().tobytes(), values.numpy().tobytes(), self._k, len(tokens))
        return msgspec.structs.replace(result, draws=draws)
