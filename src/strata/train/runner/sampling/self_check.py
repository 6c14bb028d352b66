"""Self-check at start-up: decoding with the KV cache must give the log probabilities that training computes."""

from __future__ import annotations

import math
from typing import Final

import torch

from strata.base.errors import StrataError
from strata.train.runner.model.base import BaseModel
from strata.train.runner.model.startup_check import FAILURES, TOLERANCE, first_line
from strata.train.runner.passes.logprobs import PackedRow
from strata.train.runner.sampling.attention import DecodePlan, KVPoolRows, PrefillPlan, Prompt
from strata.train.runner.sampling.inference_model import InferenceModel, gather_weights
from strata.train.runner.sampling.kv_cache import SHORTEST_SLOT, KVCache

PROMPT: Final = 7
LENGTH: Final = 12


def verify_decode_matches_training(model: InferenceModel, base: BaseModel, device: torch.device) -> str:
    """Why this architecture cannot be sampled, or an empty string. All ranks call this together.

    A layer that keeps state other than keys and values, or keeps it elsewhere, would silently sample from another
    distribution than the one that is trained.
    """
    tokens = torch.randint(base.vocabulary, (LENGTH,), generator=torch.Generator().manual_seed(1)).to(device)
    indices = torch.arange(LENGTH - 1, device=device)
    row = PackedRow(tokens=tokens, documents=[LENGTH], spans=(), logit_indices=indices, targets=tokens[1:])
    with torch.no_grad():
        trained = base.logprobs(row)
        weights = gather_weights(dict(base.lm.named_parameters()), model.dtype)
    try:
        with model.with_weights(weights), torch.inference_mode():
            logits = _prefill_and_decode(model, tokens)
    except StrataError as error:
        return f"{base.arch} cannot be sampled here: {error.message}"
    except FAILURES as error:
        return f"{base.arch} cannot be sampled here: its code fails with {type(error).__name__}: {first_line(error)}"
    decoded = torch.log_softmax(logits[:-1], dim=-1, dtype=torch.float32)[indices, tokens[1:]]
    difference = float((trained - decoded).abs().max())
    if math.isfinite(difference) and difference <= TOLERANCE[base.settings.dtype]:
        return ""
    reason = f"decoding gives other log probabilities than training (off by {difference:.2g} nats)"
    return f"{base.arch} cannot be sampled here: {reason}"


def _prefill_and_decode(model: InferenceModel, tokens: torch.Tensor) -> torch.Tensor:
    """The logits of every token: the first ones by a prefill, the others by a decode step each."""
    device = tokens.device
    pool, slot = KVCache(1, SHORTEST_SLOT).allocate("", SHORTEST_SLOT)
    prefill = PrefillPlan([Prompt(PROMPT, [(pool, slot)])])
    hidden = [model.hidden(tokens[:PROMPT], torch.arange(PROMPT, device=device), (), prefill)]
    decode = DecodePlan([KVPoolRows(pool, [0], [PROMPT], device)])
    for index in range(PROMPT, LENGTH):
        hidden.append(model.hidden(tokens[index : index + 1], torch.tensor([index], device=device), (), decode))
        decode.advance()
    return model.logits(torch.cat(hidden), ())
