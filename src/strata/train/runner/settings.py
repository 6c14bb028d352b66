"""What a rank needs to know of the server's settings, in one value that can be made without a file."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

import msgspec

from strata.train.settings import ServerSettings

LOGITS_BYTES: Final = 256 << 20
"""Logits beyond this are computed in pieces, and once more on the way back."""


class RunnerSettings(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    """A local folder in Hugging Face's form, or the id of a model in the local cache."""
    name: str = ""
    """What clients call it."""
    tokenizer_id: str = ""
    public_name: str = ""
    """What adapters are said to be for; the name unless set."""
    training: Literal["lora", "full"] = "lora"
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the arithmetic. What is trained is kept in float32."""
    backend: Literal["gloo", "nccl", "auto"] = "auto"
    slots: int = 8
    """Models with adapters on the device."""
    max_models: int = 64
    """Of them at all: those that are not used wait elsewhere."""
    models_in_memory: int = 32
    """Of those that wait; the others wait on the disk."""
    max_lora_rank: int = 64
    max_tokens_per_row: int = 4096
    row_tokens: int | None = None
    """That fit into the memory of a rank; None: to be measured."""
    activation_checkpointing: bool = False
    logits_bytes: int = LOGITS_BYTES
    sleep_folder: Path
    """Where a rank without a device puts its weights while it sleeps."""
    collective_timeout_s: float = 1800.0
    sequences: int = 64
    """That are sampled at once on each rank."""
    cached_tokens: int = 32_768
    snapshot_timeout_s: float = 1800.0
    """How long rank 0 waits for the other ranks to write their parts of a snapshot."""

    @property
    def full(self) -> bool:
        return self.training == "full"


def runner_settings(settings: ServerSettings) -> RunnerSettings:
    model = settings.model
    return RunnerSettings(
        model=model.path,
        name=model.base_model,
        tokenizer_id=model.tokenizer,
        public_name=model.public_name,
        training=model.training,
        dtype=model.dtype,
        backend=settings.ranks.backend,
        slots=1 if model.training == "full" else model.slots,
        max_models=1 if model.training == "full" else max(model.max_models, model.slots),
        models_in_memory=model.models_in_memory,
        max_lora_rank=model.max_lora_rank,
        max_tokens_per_row=model.max_tokens_per_row,
        row_tokens=model.row_tokens,
        activation_checkpointing=model.activation_checkpointing,
        sleep_folder=settings.data / "asleep",
        collective_timeout_s=settings.ranks.collective_timeout_s,
        sequences=settings.sampling.sequences,
        cached_tokens=settings.sampling.cached_tokens,
        snapshot_timeout_s=settings.snapshots.write_timeout_s,
    )
