"""Log probabilities of a prompt: of its own tokens, of the likeliest ones, of tokens that the client names, of draws.

All of them are the model's own, at temperature 1, except that the draws are made at the request's temperature.
"""

from __future__ import annotations

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
from strata.train.runner.lora.adapter import Span
from strata.train.runner.sampling.inference_model import InferenceModel
from strata.train.runner.sampling.sampling_ops import SeededRng, draw, is_greedy
from strata.train.runner.sampling.sequences import SequenceGroup, rng_name, tokens_from, top_logprobs, top_of


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    logprobs: bytes | None = None
    top: TopLogprobs | None = None
    targets: TargetLogprobs | None = None
    draws: Draws | None = None


def compute_prompt_logprobs(model: InferenceModel, group: SequenceGroup, hidden: torch.Tensor) -> PromptLogprobs:
    """From the hidden states of the prompt. The first token has no predecessor, so it has no log probability."""
    sample = group.sample
    scores = _PromptScores(sample) if sample.prompt_logprobs or sample.topk_prompt_logprobs else None
    targets = _TargetScores(sample.targets) if sample.targets is not None else None
    draws = _PromptDraws(sample) if sample.prompt_draws else None
    all_rows = targets is not None or draws is not None
    first = 0 if all_rows or scores is None else scores.first
    step = max(1, model.logits_bytes // (4 * model.vocabulary))
    for start in range(first, len(hidden) - 1, step):
        end = min(start + step, len(hidden) - 1)
        logits = model.logits(hidden[start:end], [Span(group.adapter, end - start)])
        logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
        if scores is not None:
            scores.append(logprobs, group.prompt[start + 1 : end + 1], start)
        if targets is not None:
            targets.append(logprobs, start)
        if draws is not None:
            draws.append(logprobs)
    return PromptLogprobs(
        scores.logprobs() if scores is not None and sample.prompt_logprobs else None,
        scores.top() if scores is not None and sample.topk_prompt_logprobs else None,
        targets.result() if targets is not None else None,
        draws.result() if draws is not None else None,
    )


class _PromptScores:
    """Log probabilities of the prompt's own tokens, and of the likeliest at each position, from the row `first` on."""

    def __init__(self, sample: SampleOperation) -> None:
        last = sample.prompt_logprobs_last_n
        self.first = 0 if last is None else sample.length - 1 - last
        self._k = sample.topk_prompt_logprobs
        unscored = 1 + self.first
        self._logprobs = [torch.full((unscored,), torch.nan)]
        self._tokens = [torch.zeros((unscored, self._k), dtype=torch.int32)]
        self._values = [torch.full((unscored, self._k), MISSING_LOGPROB)]

    def append(self, logprobs: torch.Tensor, tokens: torch.Tensor, start: int) -> None:
        skipped = max(self.first - start, 0)
        logprobs, tokens = logprobs[skipped:], tokens[skipped:]
        self._logprobs.append(logprobs.gather(1, tokens[:, None])[:, 0].cpu())
        if self._k:
            top = top_of(logprobs, self._k)
            self._tokens.append(top[0])
            self._values.append(top[1])

    def logprobs(self) -> bytes:
        return torch.cat(self._logprobs).numpy().tobytes()

    def top(self) -> TopLogprobs:
        return top_logprobs(torch.cat(self._tokens), torch.cat(self._values))


class _TargetScores:
    """Log probabilities of the tokens that the client named."""

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

    def result(self) -> TargetLogprobs:
        return TargetLogprobs(self._logprobs.numpy().tobytes(), self._layout)


def row_starts(layout: Layout) -> torch.Tensor:
    """The index of each row's first value, and the number of values at the end."""
    if layout.crow is not None:
        return torch.from_numpy(np.frombuffer(layout.crow, "<i8").copy())
    rows, columns = layout.shape
    return torch.arange(rows + 1) * columns


class _PromptDraws:
    """Alternative tokens drawn at each position of the prompt."""

    def __init__(self, sample: SampleOperation) -> None:
        self._k = sample.prompt_draws
        self._temperature = sample.params.temperature
        self._greedy = is_greedy(sample.params)
        # A generator of its own: the number of draws must not change what is sampled after the prompt.
        self._rng = SeededRng(f"{rng_name(sample)}/prompt")
        self._tokens: list[torch.Tensor] = [torch.zeros((0, self._k), dtype=torch.int32)]
        self._values: list[torch.Tensor] = [torch.zeros((0, self._k))]

    def append(self, logprobs: torch.Tensor) -> None:
        if self._greedy:
            tokens = logprobs.argmax(-1, keepdim=True).expand(-1, self._k)
        else:
            numbers = [[self._rng.next() for _ in range(self._k)] for _ in range(len(logprobs))]
            uniform = torch.tensor(numbers, dtype=torch.float64, device=logprobs.device)
            tokens = draw(torch.log_softmax(logprobs / self._temperature, dim=-1), uniform)
        self._tokens.append(tokens.to("cpu", torch.int32))
        self._values.append(logprobs.gather(1, tokens).cpu())

    def result(self) -> Draws:
        tokens, values = torch.cat(self._tokens), torch.cat(self._values)
        return Draws(tokens.numpy().tobytes(), values.numpy().tobytes(), self._k, len(tokens))
