"""What Hugging Face's own code says the next tokens are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from strata.train.endpoints.engine import ModelVersion


def load(base: Path, adapter: Path | None = None) -> Any:
    model = AutoModelForCausalLM.from_pretrained(str(base), dtype=torch.float32)
    return model if adapter is None else PeftModel.from_pretrained(model, str(adapter))


def greedy(model: Any, prompt: Sequence[int], tokens: int) -> list[int]:
    ids = torch.tensor([list(prompt)])
    with torch.no_grad():
        made = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            eos_token_id=None,
        )
    found: list[int] = made[0, len(prompt) :].tolist()
    return found


def made_weights(base: Path, folder: Path) -> tuple[ModelVersion, ModelVersion]:
    """Two adapters of the base, drawn at random."""
    versions = []
    for number in (1, 2):
        config = LoraConfig(r=8, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(number)
            model = get_peft_model(load(base), config)
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.data.normal_(std=0.3)
        model.save_pretrained(str(folder / f"adapter-{number}"))
        versions.append(ModelVersion(f"drawn-v{number}", folder / f"adapter-{number}", full=False))
    return versions[0], versions[1]
