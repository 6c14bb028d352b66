"""The same numbers the plain way: Hugging Face's model, and PEFT's adapters in it, one document at a time, unpacked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from strata.train.core import ops
from strata.train.plan.quantisation import QuantisedKind
from tests.shell.train_runner.driver import array_of, tokens_of


def plain(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32, attn_implementation="eager").train()


def bitsandbytes_model(path: Path, kind: QuantisedKind, dtype: torch.dtype) -> Any:
    """As transformers quantises it. In training mode bitsandbytes dequantises int8 weights on a CPU, and quantises no
    activations."""
    options: dict[QuantisedKind, dict[str, Any]] = {
        "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype},
        "int8": {"load_in_8bit": True},
    }
    quantised = BitsAndBytesConfig(**options[kind])  # type: ignore[no-untyped-call]
    return AutoModelForCausalLM.from_pretrained(
        str(path), dtype=dtype, attn_implementation="eager", quantization_config=quantised, device_map="cpu"
    )


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
