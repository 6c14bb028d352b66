"""Samples tokens from logits: temperature, min-p, top-k, top-p, seeded draws, and their log probabilities.

Everything works on a whole batch at once, each row with its own parameters. A row's draw needs one number between 0
and 1, which comes from the sequence's own seeded random number generator: it is the same whatever else is in the batch,
and on every rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from strata.train.core.sampling import SampleParams
from strata.train.runner.sampling.logits_shape import LogitsShape

DRAWN_AT_ONCE: Final = 128
TOP_P_HEAD: Final = 256
"""How many of the likeliest tokens top-p looks at first; all are sorted only where these are not enough."""


class SeededRng:
    """Numbers in [0, 1), one after the other, that follow from a name alone."""

    def __init__(self, name: str) -> None:
        key = np.frombuffer(hashlib.sha256(name.encode()).digest()[:16], dtype="<u8")
        self._bits = np.random.Philox(key=key)
        self._drawn: list[float] = []

    def next(self) -> float:
        if not self._drawn:
            # Raw bits, because how numpy turns them into numbers may change between its versions.
            raw = self._bits.random_raw(DRAWN_AT_ONCE)
            self._drawn = ((raw[::-1] >> np.uint64(11)) * 2.0**-53).tolist()
        return self._drawn.pop()


class LogitsProcessor:
    """Temperature, min-p, top-k and top-p of each row of a batch, and the shape of its logits, for rows with one."""

    def __init__(
        self,
        params: Sequence[SampleParams],
        vocabulary: int,
        device: torch.device,
        shapes: Sequence[LogitsShape | None] = (),
    ) -> None:
        self.greedy = [row.is_greedy for row in params]
        self.draws = not all(self.greedy)
        temperatures = [_temperature(row) for row in params]
        warm = any(temperature != 1.0 for temperature in temperatures)
        self.temperature = torch.tensor(temperatures, device=device)[:, None] if warm else None
        self.is_greedy = torch.tensor(self.greedy, device=device)
        self.shapes = [(number, shape) for number, shape in enumerate(shapes) if shape is not None]
        shares = [0.0 if row.is_greedy else row.min_p for row in params]
        self.min_p = torch.tensor(shares, device=device)[:, None] if any(shares) else None
        truncated = [number for number, row in enumerate(params) if _is_truncated(row, vocabulary)]
        top_k = [_top_k(params[number], vocabulary) for number in truncated]
        top_p = [params[number].top_p for number in truncated]
        self.truncated = torch.tensor(truncated, dtype=torch.int64, device=device) if truncated else None
        """The rows with top-k or top-p."""
        self.top_k = torch.tensor(top_k, dtype=torch.int64, device=device)
        self.top_p = torch.tensor(top_p, dtype=torch.float64, device=device)


def _temperature(params: SampleParams) -> float:
    return 1.0 if params.is_greedy else params.temperature


def _top_k(params: SampleParams, vocabulary: int) -> int:
    return params.top_k if 0 < params.top_k < vocabulary else vocabulary


def _is_truncated(params: SampleParams, vocabulary: int) -> bool:
    return not params.is_greedy and (_top_k(params, vocabulary) < vocabulary or params.top_p < 1.0)


@dataclass(frozen=True)
class SampledTokens:
    tokens: torch.Tensor
    logprobs: torch.Tensor
    distribution: torch.Tensor
    """The log probability of every token of each row after processing; -inf where a token was cut off."""


def sample_tokens(logits: torch.Tensor, processor: LogitsProcessor, uniform: torch.Tensor | None) -> SampledTokens:
    """Sample one token for each row of logits. `uniform` has a number in [0, 1) for each row, if any row draws."""
    logits = logits.float()
    if processor.shapes:
        rows = dict(processor.shapes)
        logits = torch.stack([rows[number].apply(row) if number in rows else row for number, row in enumerate(logits)])
    if processor.temperature is not None:
        # Subtract the largest, so that nothing overflows at low temperatures.
        logits = (logits - logits.amax(-1, keepdim=True)) / processor.temperature
    if processor.min_p is not None:
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + processor.min_p.log(), -torch.inf)
    if processor.truncated is not None:
        limited = logits[processor.truncated]
        limited = limited.masked_fill(limited < _threshold(limited, processor.top_k, processor.top_p), -torch.inf)
        logits = logits.index_copy(0, processor.truncated, limited)
    distribution = torch.log_softmax(logits, dim=-1)
    if not processor.draws or uniform is None:
        tokens = logits.argmax(-1)
    else:
        tokens = draw(distribution, uniform[:, None])[:, 0]
        if any(processor.greedy):
            tokens = torch.where(processor.is_greedy, logits.argmax(-1), tokens)
    return SampledTokens(tokens, distribution.gather(1, tokens[:, None])[:, 0], distribution)


def draw(distribution: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Inverse transform sampling: for each number of a row the token in whose part of the unit interval it falls.

    Never a token of no probability: `right` passes over such tokens, and the number is kept below the sum.
    """
    cumulative = distribution.exp().cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    point = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    # Logits that are not finite could point behind the last token; the token's log probability shows it.
    return torch.searchsorted(cumulative, point, right=True).clamp_(max=distribution.shape[-1] - 1)


def _threshold(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, width: int = TOP_P_HEAD) -> torch.Tensor:
    """The smallest logit of each row that is kept: top-k first, then the fewest of those that make up top-p.

    Tokens as likely as the last one kept are kept too, so that the order of the vocabulary does not matter.
    """
    vocabulary = logits.shape[-1]
    limited = top_k < vocabulary
    width = min(vocabulary, max(width, int((top_k * limited).max())))
    values = logits.topk(width, dim=-1).values
    beyond = torch.arange(width, device=logits.device) >= top_k[:, None]
    values = values.masked_fill(beyond, -torch.inf)
    total = torch.where(limited, values.double().logsumexp(-1), logits.double().logsumexp(-1))
    probabilities = (values.double() - total[:, None]).exp()
    cumulative = probabilities.cumsum(-1)
    kept = ((cumulative - probabilities < top_p[:, None]) & ~beyond).sum(-1, keepdim=True).clamp_(min=1)
    threshold = values.gather(1, kept - 1)
    insufficient = (cumulative[:, -1] < top_p) & ~limited
    if width < vocabulary and bool(insufficient.any()):
        threshold[insufficient] = _threshold(logits[insufficient], top_k[insufficient], top_p[insufficient], vocabulary)
    # Rows without top-p keep everything: rounding must not cut off their last tokens.
    unlimited = (top_p >= 1.0) & ~limited
    return threshold.masked_fill(unlimited[:, None], -torch.inf)
