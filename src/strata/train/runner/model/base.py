"""The base model on the ranks: loaded, verified (`startup_check`), fitted with LoRA hooks and sharded (FSDP)."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as transformers_logging

from strata.base.errors import Code, StrataError
from strata.train.core.commands import ModelInfo
from strata.train.runner.collectives import RankGroup
from strata.train.runner.lora import Adapters, adapt_experts
from strata.train.runner.model.attention import ATTENTION
from strata.train.runner.model.startup_check import compute_reference, unsupported_errors, verify_packing
from strata.train.runner.passes.logprobs import PackedModel, PackedRow
from strata.train.runner.settings import RunnerSettings

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FLOAT32_BYTES: Final = 2 << 30
"""A model whose files are up to this size is loaded a second time, in float32, for the start-up check."""


class BaseModel:
    """The loaded and sharded model. All ranks construct it together.

    It computes in evaluation mode, also in training: without dropout and without noise in routers, so that the same
    pass gives the same numbers.
    """

    def __init__(self, settings: RunnerSettings, ranks: RankGroup) -> None:
        self.settings = settings
        with ranks.collective_errors():
            lm = load_lm(settings.model, self.storage_dtype)
        self.arch = str(lm.config.model_type)
        with unsupported_errors(self.arch):
            text = lm.config.get_text_config(decoder=True)
            self.vocabulary = int(text.vocab_size)
            self.max_context = longest_context(text)
            self.parameters = sum(parameter.numel() for parameter in lm.parameters())
            # The reference has to be computed before the model is modified in any way.
            lm.to(ranks.device)  # type: ignore[arg-type]
            reference = compute_reference(lm, self.vocabulary, ranks.device)
            self.decoder = reference.decoder
            self.adapters = self._add_hooks(lm)
            self.packed = PackedModel(lm, self.decoder, self.adapters, settings.logits_bytes)
            shard(self.packed, settings, ranks)
            self.lm = lm
            verify_packing(reference, self.logprobs, settings.dtype)

    def _add_hooks(self, lm: PreTrainedModel) -> Adapters | None:
        if not lm._can_set_attn_implementation():
            raise StrataError(Code.UNSUPPORTED, "its attention is not one that can be replaced")
        lm.set_attn_implementation(ATTENTION)
        adapters = None if self.settings.full else Adapters(lm)
        if adapters is not None:
            adapt_experts(lm, adapters)
            lm.requires_grad_(requires_grad=False)
            # Then every layer takes part in the backward pass of every rank, whichever adapters its row has. Each layer
            # has a collective in the backward pass; a rank that left one out would wait for the others for ever.
            lm.enable_input_require_grads()  # type: ignore[no-untyped-call]
        if self.settings.activation_checkpointing:
            checkpoint_layers(lm)
        return adapters

    def logprobs(self, row: PackedRow) -> torch.Tensor:
        """Log probabilities of a packed row. All ranks call this together.

        Without a backward pass, which would reshard them, gathered weights are resharded here; they would be stale
        after the next optimizer step.
        """
        if self.adapters is not None:
            # The spans stay until the next pass: the backward pass may recompute the layers.
            self.adapters.row = row.spans
        logprobs = self.packed(row)
        if not torch.is_grad_enabled():
            for module in self.packed.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        assert isinstance(logprobs, torch.Tensor)
        return logprobs

    @property
    def storage_dtype(self) -> torch.dtype:
        """Trained weights are stored in float32; a frozen base is stored in the dtype of the arithmetic."""
        return torch.float32 if self.settings.full else DTYPES[self.settings.dtype]

    def info(self) -> ModelInfo:
        settings = self.settings
        return ModelInfo(
            name=settings.name or Path(settings.model).name,
            arch=self.arch,
            tokenizer_id=settings.tokenizer_id or settings.model,
            vocab_size=self.vocabulary,
            max_context=self.max_context,
            full=settings.full,
            max_lora_rank=settings.max_lora_rank,
            slots=1 if settings.full else settings.slots,
            parameters=self.parameters,
        )


def load_lm(path: str, dtype: torch.dtype) -> PreTrainedModel:
    """A causal language model from a local folder or the local cache: safetensors only, and no remote code."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            attn_implementation="eager",
            experts_implementation="eager",
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError) as error:
        raise StrataError(Code.INVALID, f"cannot load the model {path}: {error}") from error
    assert isinstance(model, PreTrainedModel)
    return model


def longest_context(config: PreTrainedConfig) -> int:
    longest = getattr(config, "max_position_embeddings", None)
    if not isinstance(longest, int):
        raise StrataError(Code.UNSUPPORTED, "its configuration has no max_position_embeddings")
    return longest


def checkpoint_layers(lm: PreTrainedModel) -> None:
    """Activation checkpointing: layers are recomputed in the backward pass. transformers does that only in training
    mode, so the mode is set for the layers, but not for the modules inside; a layer's own dropout is set to 0."""
    lm.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    for module in lm.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True
            for name, value in vars(module).items():
                if "drop" in name and isinstance(value, float):
                    setattr(module, name, 0.0)


def shard(packed: PackedModel, settings: RunnerSettings, ranks: RankGroup) -> None:
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    compute = DTYPES[settings.dtype]
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    blocks = set(packed.lm._no_split_modules or ())
    for module in list(packed.lm.modules()):
        if type(module).__name__ in blocks:
            fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(packed, mesh=mesh, mp_policy=policy)
    for module in packed.modules():
        if isinstance(module, FSDPModule):
            # FSDP would average over the ranks. A loss is a sum, so its gradient is one too.
            module.set_gradient_divide_factor(1.0)
            # A plain sum, which every backend supports.
            module.set_force_sum_reduction_for_comms(enable=True)


def load_base(settings: RunnerSettings, ranks: RankGroup) -> BaseModel:
    """Load and verify the base. In bfloat16, rounding hides small errors: if the model is small enough, the start-up
    check runs first in float32, on a copy that is then freed."""
    if settings.dtype != "float32" and _affordable_in_float32(settings.model):
        BaseModel(msgspec.structs.replace(settings, dtype="float32"), ranks)
    return BaseModel(settings, ranks)


def _affordable_in_float32(path: str) -> bool:
    """By the files in its folder. The size of a model in the cache is unknown."""
    sizes = [file.stat().st_size for file in Path(path).glob("*.safetensors")]
    return 0 < sum(sizes) <= FLOAT32_BYTES


def tokenizer_files(path: str) -> list[Path]:
    folder = Path(path)
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
    return [folder / name for name in names if (folder / name).is_file()]
