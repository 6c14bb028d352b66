"""Whether an architecture can be sampled here, found out before anybody's prompt goes through it."""

from __future__ import annotations

import math
from typing import Final

import torch

from strata.base.errors import StrataError
from strata.train.runner.model.base import BaseModel
from strata.train.runner.model.startup_check import FAILURES, TOLERANCE, first_line
from strata.train.runner.passes.logprobs import Row
from strata.train.runner.sampling.attention import DecodePlan, KVPoolRows, PrefillPlan, Prompt
from strata.train.runner.sampling.inference_model import InferenceModel, put_together
from strata.train.runner.sampling.kv_cache import SHORTEST, KVCache

PROMPT: Final = 7
LENGTH: Final = 12


def verify_decode_matches_training(twin: InferenceModel, base: BaseModel, device: torch.device) -> str:
    """Tokens one by one must be as likely as in the pass that trains on them. All ranks call this together.

    A layer that remembers something else than keys and values, or that keeps it somewhere else, would sample on
    silently from another distribution; this says so. Empty is no trouble.
    """
    tokens = torch.randint(base.vocabulary, (LENGTH,), generator=torch.Generator().manual_seed(1)).to(device)
    places = torch.arange(LENGTH - 1, device=device)
    row = Row(tokens=tokens, documents=[LENGTH], spans=(), places=places, targets=tokens[1:])
    with torch.no_grad():
        trained = base.logprobs(row)
        weights = put_together(dict(base.lm.named_parameters()), twin.dtype)
    try:
        with twin.with_weights(weights), torch.inference_mode():
            logits = _one_by_one(twin, tokens)
    except StrataError as error:
        return f"{base.arch} cannot be sampled here: {error.message}"
    except FAILURES as error:
        return f"{base.arch} cannot be sampled here: its code fails with {type(error).__name__}: {first_line(error)}"
    sampled = torch.log_softmax(logits[:-1], dim=-1, dtype=torch.float32)[places, tokens[1:]]
    apart = float((trained - sampled).abs().max())
    if math.isfinite(apart) and apart <= TOLERANCE[base.settings.dtype]:
        return ""
    what = f"its tokens one by one are not those of a pass (off by {apart:.2g} nats)"
    return f"{base.arch} cannot be sampled here: {what}"


def _one_by_one(twin: InferenceModel, tokens: torch.Tensor) -> torch.Tensor:
    """The logits at every token: the first ones as a prompt, the others in a step each."""
    device = tokens.device
    shelf, place = KVCache(1, SHORTEST).take("", SHORTEST)
    prompt = PrefillPlan([Prompt(PROMPT, [(shelf, place)])])
    found = [twin.hidden(tokens[:PROMPT], torch.arange(PROMPT, device=device), (), prompt)]
    step = DecodePlan([KVPoolRows(shelf, [0], [PROMPT], device)])
    for at in range(PROMPT, LENGTH):
        found.append(twin.hidden(tokens[at : at + 1], torch.tensor([at], device=device), (), step))
        step.advance()
    return twin.logits(torch.cat(found), ())
