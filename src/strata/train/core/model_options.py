"""Options of models and their defaults: LoRA (rank 32), AdamW and Muon (learning rate, betas), schedules of the
learning rate, names of losses.

Clients set them, the recipes of the SDK too; field names are stored in the journal and keep their spelling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Final, Literal

import msgspec

OptimizerName = Literal["adamw", "muon"]
ScheduleKind = Literal["constant", "linear", "cosine"]


class LossName(StrEnum):
    CROSS_ENTROPY = "cross_entropy"
    IMPORTANCE_SAMPLING = "importance_sampling"
    PPO = "ppo"
    CISPO = "cispo"
    DRO = "dro"
    GSPO = "gspo"
    CUSTOM = "custom"
    """A loss that the client has created: its graph is in the payload."""


CLIP_LOW: Final = "clip_low_threshold"
CLIP_HIGH: Final = "clip_high_threshold"
MASK_OUTLIERS: Final = "mask_outliers"
SEQUENCE_LEVEL: Final = "sequence_level"
GAP_TOLERANCE: Final = "gap_tolerance"
"""Names in the config of a loss."""


def is_set(metadata: Mapping[str, str], name: str) -> bool:
    """Says whether the metadata of a model switches this on."""
    return metadata.get(name, "").lower() in ("true", "1", "yes")


class LoraConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rank: int = 32
    alpha: float = 32.0
    seed: int | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


class AdamParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One step of AdamW with the parameters of the client. Every one of them is applied."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """0 is no clipping."""


class MuonParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One step of Muon with the parameters of the client: those of `torch.optim.Muon`, without weight decay unless it
    is given."""

    learning_rate: float
    momentum: float = 0.95
    nesterov: bool = True
    weight_decay: float = 0.0
    ns_steps: int = 5
    """Newton-Schulz iterations that orthogonalise an update."""
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "original"
    grad_clip_norm: float = 0.0
    """0 is no clipping."""


class Schedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A factor on the learning rate of each step: linear warm-up, then constant, linear or cosine down to `floor`."""

    kind: ScheduleKind = "constant"
    warmup_steps: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] = 0
    total_steps: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] = 0
    floor: float = 0.0

    def factor(self, step: int) -> float:
        """Returns the factor of the step with this number, the first being 1."""
        if step < self.warmup_steps:
            return step / self.warmup_steps
        if step == self.warmup_steps or self.kind == "constant" or self.total_steps <= self.warmup_steps:
            return 1.0
        done = min((step - self.warmup_steps) / (self.total_steps - self.warmup_steps), 1.0)
        shape = 1.0 - done if self.kind == "linear" else (1.0 + math.cos(math.pi * done)) / 2
        return self.floor + (1.0 - self.floor) * shape
