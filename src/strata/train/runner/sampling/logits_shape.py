"""Shapes the logits of one sequence before they become a distribution: its grammar, biases, and penalties for what it
has sampled.

A rank steps the matcher of a grammar once for each token (`strata.train.grammar`).
"""

from __future__ import annotations

from typing import Protocol

import torch

from strata.train.core.sampling import SampleParams


class Matcher(Protocol):
    """What llguidance's `LLMatcher` does for one sequence."""

    def compute_bitmask(self) -> bytes: ...
    def consume_token(self, sampled_token: int) -> bool: ...
    def is_error(self) -> bool: ...
    def get_error(self) -> str: ...


class LogitsShape:
    """What the next token of one sequence depends on beside the model. It has counts over the whole vocabulary only if
    there are penalties."""

    def __init__(self, params: SampleParams, prompt: torch.Tensor, vocabulary: int, matcher: Matcher | None) -> None:
        device = prompt.device
        self._params = params
        self._matcher = matcher
        self._counts: torch.Tensor | None = None
        if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1:
            self._counts = torch.zeros(vocabulary, device=device)
        self._repeated: torch.Tensor | None = None
        if params.repetition_penalty != 1:
            self._repeated = torch.zeros(vocabulary, dtype=torch.bool, device=device)
            self._repeated[prompt] = True
        self._biased = torch.tensor([token for token, _ in params.logit_bias], dtype=torch.int64, device=device)
        self._biases = torch.tensor([bias for _, bias in params.logit_bias], dtype=torch.float32, device=device)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits of this sequence's next token, float32."""
        if len(self._biased):
            logits = logits.index_add(0, self._biased, self._biases)
        if self._repeated is not None:
            factor = self._params.repetition_penalty
            logits = torch.where(self._repeated, torch.where(logits > 0, logits / factor, logits * factor), logits)
        if self._counts is not None:
            presence, frequency = self._params.presence_penalty, self._params.frequency_penalty
            logits = logits - presence * (self._counts > 0) - frequency * self._counts
        if self._matcher is not None:
            logits = logits.masked_fill(~self._allowed(self._matcher, logits), -torch.inf)
        return logits

    def _allowed(self, matcher: Matcher, logits: torch.Tensor) -> torch.Tensor:
        bits = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.uint8)
        each = torch.arange(8, dtype=torch.uint8)
        allowed = ((bits[:, None] >> each) & 1).flatten().bool()[: len(logits)]
        # A vocabulary may be padded beyond the tokens that the tokenizer knows.
        return torch.nn.functional.pad(allowed, (0, len(logits) - len(allowed))).to(logits.device)

    def accept(self, token: int) -> None:
        if self._counts is not None:
            self._counts[token] += 1
        if self._repeated is not None:
            self._repeated[token] = True
        if self._matcher is not None:
            self._matcher.consume_token(token)

    @property
    def failure(self) -> str:
        """Says why no further token can be drawn; empty if one can."""
        if self._matcher is None or not self._matcher.is_error():
            return ""
        return f"the grammar is too complex to go on: {self._matcher.get_error()[:300]}"
