"""From logits to tokens: temperature, top-k and top-p, and a draw that depends on nothing but the sequence itself.

All of it works on a whole batch at once, each row with parameters of its own. A row's draw needs one number between 0
and 1, which comes from the sequence's own chance: whatever else is in the batch, and on whichever rank, it is the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from strata.train.core.sampling import SampleParams

DRAWN_AT_ONCE: Final = 128
HEAD: Final = 256
"""How many of the likeliest tokens are looked at first for top-p; only where they are not enough all are sorted."""
COLDEST: Final = 1e-6
"""A temperature below this is 0."""


class SeededRng:
    """Numbers in [0, 1), one after the other, that follow from a name alone."""

    def __init__(self, name: str) -> None:
        key = np.frombuffer(hashlib.sha256(name.encode()).digest()[:16], dtype="<u8")
        self._bits = np.random.Philox(key=key)
        self._drawn: list[float] = []

    def next(self) -> float:
        if not self._drawn:
            # Raw bits, because how they become numbers elsewhere may change between versions.
            raw = self._bits.random_raw(DRAWN_AT_ONCE)
            self._drawn = ((raw[::-1] >> np.uint64(11)) * 2.0**-53).tolist()
        return self._drawn.pop()


def is_greedy(params: SampleParams) -> bool:
    return params.temperature < COLDEST


class Transform:
    """What the rows of a batch do to their logits before they draw."""

    def __init__(self, params: Sequence[SampleParams], vocabulary: int, device: torch.device) -> None:
        self.greedy = [is_greedy(own) for own in params]
        self.draws = not all(self.greedy)
        pairs = [(1.0 if greedy else own.temperature) for own, greedy in zip(params, self.greedy, strict=True)]
        self.temperature = torch.tensor(pairs, device=device)[:, None] if any(t != 1.0 for t in pairs) else None
        self.is_greedy = torch.tensor(self.greedy, device=device)
        cut: list[int] = []
        top_k: list[int] = []
        top_p: list[float] = []
        for row, (own, greedy) in enumerate(zip(params, self.greedy, strict=True)):
            limit = own.top_k if 0 < own.top_k < vocabulary else vocabulary
            if not greedy and (limit < vocabulary or own.top_p < 1.0):
                cut.append(row)
                top_k.append(limit)
                top_p.append(own.top_p)
        self.cut = torch.tensor(cut, dtype=torch.int64, device=device) if cut else None
        self.top_k = torch.tensor(top_k, dtype=torch.int64, device=device)
        self.top_p = torch.tensor(top_p, dtype=torch.float64, device=device)


@dataclass(frozen=True)
class Chosen:
    tokens: torch.Tensor
    logprobs: torch.Tensor
    distribution: torch.Tensor
    """Of every row and token the log-probability under the transform; -inf where a token was cut off."""


def sample_tokens(logits: torch.Tensor, transform: Transform, uniform: torch.Tensor | None) -> Chosen:
    """One token for each row of logits. `uniform` has a number in [0, 1) for each row, if any row draws."""
    logits = logits.float()
    if transform.temperature is not None:
        # Less the largest, so that nothing overflows however cold it is.
        logits = (logits - logits.amax(-1, keepdim=True)) / transform.temperature
    if transform.cut is not None:
        rows = logits[transform.cut]
        rows = rows.masked_fill(rows < _threshold(rows, transform.top_k, transform.top_p), -torch.inf)
        logits = logits.index_copy(0, transform.cut, rows)
    distribution = torch.log_softmax(logits, dim=-1)
    if not transform.draws or uniform is None:
        tokens = logits.argmax(-1)
    else:
        tokens = draw(distribution, uniform[:, None])[:, 0]
        if any(transform.greedy):
            tokens = torch.where(transform.is_greedy, logits.argmax(-1), tokens)
    return Chosen(tokens, distribution.gather(1, tokens[:, None])[:, 0], distribution)


def draw(distribution: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """For each number of a row the token in whose part of the unit interval it falls. Never one that has no part:
    `right` passes over tokens of no probability, and the number is kept below the sum."""
    steps = distribution.exp().cumsum(-1, dtype=torch.float64)
    total = steps[:, -1:]
    at = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    # Logits that are not numbers could point behind the last token; their log-probability tells.
    return torch.searchsorted(steps, at, right=True).clamp_(max=distribution.shape[-1] - 1)


def _threshold(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, width: int = HEAD) -> torch.Tensor:
    """Of each row the smallest logit that is kept: top-k first, then of those the fewest that make up top-p.

    Tokens as likely as the last one kept are kept too, so that the order of the vocabulary does not matter.
    """
    vocabulary = logits.shape[-1]
    limited = top_k < vocabulary
    width = min(vocabulary, max(width, int((top_k * limited).max())))
    values = logits.topk(width, dim=-1).values
    beyond = torch.arange(width, device=logits.device) >= top_k[:, None]
    values = values.masked_fill(beyond, -torch.inf)
    whole = torch.where(limited, values.double().logsumexp(-1), logits.double().logsumexp(-1))
    part = (values.double() - whole[:, None]).exp()
    upto = part.cumsum(-1)
    kept = ((upto - part < top_p[:, None]) & ~beyond).sum(-1, keepdim=True).clamp_(min=1)
    found = values.gather(1, kept - 1)
    short = (upto[:, -1] < top_p) & ~limited
    if width < vocabulary and bool(short.any()):
        found[short] = _threshold(logits[short], top_k[short], top_p[short], vocabulary)
    # Without top-p nothing is short of it: rounding must not cut off the last ones.
    unlimited = (top_p >= 1.0) & ~limited
    return found.masked_fill(unlimited[:, None], -torch.inf)
