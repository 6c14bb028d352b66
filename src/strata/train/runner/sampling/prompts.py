"""What the model says of a prompt: how likely each of its tokens was, and what would have been likelier."""

from __future__ import annotations

import torch

from strata.train.core.sampling import MISSING_LOGPROB, TopLogprobs
from strata.train.runner.lora import Span
from strata.train.runner.sampling.sequences import Request, top_logprobs, top_of
from strata.train.runner.sampling.twin import Twin


def about_prompt(twin: Twin, request: Request, hidden: torch.Tensor) -> tuple[bytes | None, TopLogprobs | None]:
    """From the hidden states of the prompt. The first token has none before it that could speak of it."""
    k = request.sample.topk_prompt_logprobs
    logprobs = [torch.full((1,), torch.nan)]
    tokens = [torch.zeros((1, k), dtype=torch.int32)]
    values = [torch.full((1, k), MISSING_LOGPROB)]
    step = max(1, twin.logits_bytes // (4 * twin.vocabulary))
    for start in range(0, len(hidden) - 1, step):
        end = min(start + step, len(hidden) - 1)
        logits = twin.logits(hidden[start:end], [Span(request.adapter, end - start)])
        found = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
        logprobs.append(found.gather(1, request.prompt[start + 1 : end + 1, None])[:, 0].cpu())
        if k:
            top = top_of(found, k)
            tokens.append(top[0])
            values.append(top[1])
    return (
        torch.cat(logprobs).numpy().tobytes() if request.sample.prompt_logprobs else None,
        top_logprobs(torch.cat(tokens), torch.cat(values)) if k else None,
    )
