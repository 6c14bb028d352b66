"""The settings of a rank, taken from those of the server: dtype, slots, row length, limits of the sampler, memory for
logits (256 MiB).
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

import msgspec

from strata.train.combinations import Combination
from strata.train.parallel import ParallelSettings
from strata.train.plan.fused_kernels import AttentionKernel, FusedLayers
from strata.train.plan.quantisation import Quantise
from strata.train.settings import ServerSettings

LOGITS_BYTES: Final = 256 << 20
"""Logits beyond this are computed in chunks, and recomputed in the backward pass."""


class RunnerSettings(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    """A local folder in Hugging Face's format, or the id of a model in the local cache."""
    name: str = ""
    """The name that clients use."""
    tokenizer_id: str = ""
    public_name: str = ""
    """The base model that exported adapters name; `name` unless set."""
    training: Literal["lora", "full"] = "lora"
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """The dtype of the arithmetic. Trained weights are stored in float32, or in float64, in which meshes are compared.
    """
    quantise: Quantise = ""
    """How the linear layers of a frozen base are quantised."""
    backend: Literal["gloo", "nccl", "auto"] = "auto"
    slots: int = 8
    """LoRA models that are resident on the device at once."""
    max_models: int = 64
    """LoRA models in all: idle ones are offloaded."""
    models_in_memory: int = 32
    """Offloaded models in the host's memory; the others are on its disk."""
    max_lora_rank: int = 64
    max_tokens_per_row: int = 4096
    row_tokens: int | None = None
    """Tokens of a row that fit into the memory of a rank; None: measured at the start."""
    replicated_bytes: int = 0
    """A frozen base of at most this size is on every rank in full; a larger one is sharded. Gradients of all weights
    that are at most so large are reduced once in a pass; larger ones after every row."""
    parallel: ParallelSettings = ParallelSettings()
    """The mesh of the ranks. A base that every rank has in full is on no mesh."""
    activation_checkpointing: bool | int = False
    """Recomputes activations of every layer, or of every n-th."""
    offload: bool = False
    """Whether weights, their gradients and the optimizer state are in the memory of the host."""
    compile_folder: Path | None = None
    """Where compiled layers are cached. None: they are not compiled."""
    fused_layers: FusedLayers = ""
    """Whose kernels norms, rotary embeddings and gated layers are computed by; empty: plain ones."""
    attention: AttentionKernel = ""
    """The version of FlashAttention for rows on CUDA devices; empty: torch's own."""
    logits_bytes: int = LOGITS_BYTES
    sleep_folder: Path
    """Where a rank without a device offloads its weights while it sleeps."""
    first_pass_timeout_s: float = 1800.0
    """How long a collective may take until the first pass has ended."""
    collective_timeout_s: float = 1800.0
    """How long one may take after that."""
    deterministic: bool = False
    """Only kernels and collectives that give the same bits again."""
    sequences: int = 64
    """Sequences that run at once on each rank."""
    cached_tokens: int = 32_768
    """Capacity of each rank's KV cache."""
    prefix_tokens: int = 8192
    """Tokens of earlier prompts that are kept in it."""
    snapshot_timeout_s: float = 1800.0
    """How long rank 0 waits for the other ranks to write their files of a snapshot."""

    @property
    def combination(self) -> Combination:
        return Combination(
            parallel=self.parallel,
            training=self.training,
            quantise=self.quantise,
            compile=self.compile_folder is not None,
            fused_layers=self.fused_layers,
            attention=self.attention,
            offload=self.offload,
        )

    @property
    def full(self) -> bool:
        return self.training == "full"


def runner_settings(settings: ServerSettings) -> RunnerSettings:
    model, values = settings.model, settings.by_device
    return RunnerSettings(
        model=model.path,
        name=model.base_model,
        tokenizer_id=model.tokenizer,
        public_name=model.public_name,
        training=model.training,
        dtype=values.dtype,
        quantise=model.quantise,
        backend=settings.ranks.backend,
        slots=1 if model.training == "full" else model.slots,
        max_models=model.places,
        models_in_memory=model.models_in_memory,
        max_lora_rank=model.max_lora_rank,
        max_tokens_per_row=values.max_tokens_per_row,
        row_tokens=model.row_tokens,
        replicated_bytes=values.replicated_mb << 20,
        parallel=settings.parallel,
        activation_checkpointing=model.activation_checkpointing,
        offload=model.offload,
        compile_folder=settings.compile_folder if model.compile else None,
        fused_layers=model.fused_layers,
        attention=model.attention,
        sleep_folder=settings.data / "asleep",
        first_pass_timeout_s=values.first_pass_timeout_s,
        collective_timeout_s=values.collective_timeout_s,
        deterministic=settings.ranks.deterministic,
        sequences=settings.sampling.sequences,
        cached_tokens=settings.sampling.cached_tokens,
        prefix_tokens=settings.sampling.prefix_tokens,
    )
