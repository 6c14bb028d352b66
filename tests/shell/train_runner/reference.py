"""The same numbers the plain way: Hugging Face's model, and PEFT's adapters in it, one document at a time, unpacked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from strata.train.core import ops
from tests.shell.train_runner.driver import array_of, tokens_of


def plain(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32, attn_implementation="eager").train()


def with_adapter(path: Path, adapter: Path) -> Any:
    return PeftModel.from_pretrained(plain(path), str(adapter), is_trainable=True)


def logprobs(model: Any, one: ops.Datum) -> torch.Tensor:
    targets = torch.from_numpy(array_of(one.inputs["target_tokens"]).copy())
    logits = model(input_ids=tokens_of(one)[None]).logits[0]
    return torch.log_softmax(logits.float(), -1).gather(1, targets[:, None])[:, 0]


def train(model: Any, datums: Sequence[ops.Datum]) -> tuple[float, list[torch.Tensor], dict[str, torch.Tensor]]:
    """Loss of cross-entropy, log-probabilities, and the gradient of every parameter that has one."""
    model.zero_grad()
    found = [logprobs(model, one) for one in datums]
    weights = [torch.from_numpy(array_of(one.inputs["weights"]).copy()) for one in datums]
    loss = torch.stack([-(weight * own).sum() for weight, own in zip(weights, found, strict=True)]).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    return float(loss.detach()), [own.detach() for own in found], gradients
