"""The base model on the ranks: read, sharded, and tried out before anybody's data goes through it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from strata.base.errors import Code, StrataError
from strata.train.core.commands import ModelInfo
from strata.train.runner.experts import adapt_experts
from strata.train.runner.lora import Adapters
from strata.train.runner.packed import ATTENTION, PackedModel, Row
from strata.train.runner.ranks import Ranks
from strata.train.runner.settings import RunnerSettings

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOLERANCE: Final = {"float32": 1e-3, "bfloat16": 0.25}
"""How far two ways of computing the same log-probability may be apart."""


class Base:
    """The loaded model and how it is sharded."""

    def __init__(self, settings: RunnerSettings, ranks: Ranks) -> None:
        self.settings = settings
        with ranks.in_step():
            lm = read(settings.model, self.kept_dtype)
        self.arch = str(lm.config.model_type)
        self.vocabulary = int(lm.config.get_text_config().vocab_size)
        self.max_context = int(lm.config.get_text_config().max_position_embeddings)
        self.parameters = sum(parameter.numel() for parameter in lm.parameters())
        self.adapters = None if settings.full else Adapters(lm)
        if self.adapters is not None:
            adapt_experts(lm, self.adapters)
            lm.requires_grad_(requires_grad=False)
            # Every layer then takes part in every backward, on every rank, whichever adapters its row has: the ranks
            # meet in the layers on the way back, and a rank that left one out would wait for the others for ever.
            lm.enable_input_require_grads()  # type: ignore[no-untyped-call]
        if settings.activation_checkpointing:
            lm.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
        without_dropout(lm)
        self.packed = PackedModel(lm, self.adapters, settings.logits_bytes).to(ranks.device)
        self.packed.train()
        shard(self.packed, settings, ranks)
        self.lm = lm

    def logprobs(self, row: Row, *, by_engine: bool = False) -> torch.Tensor:
        """All ranks together. Without a backward to come, nobody else gives back the weights that were put together;
        they would be old ones after the next step."""
        if self.adapters is not None:
            # They stay until the next pass: the way back may compute the layers once more.
            self.adapters.row = row.spans
        found = self.packed(row, by_engine=by_engine)
        if not torch.is_grad_enabled():
            for module in self.packed.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        assert isinstance(found, torch.Tensor)
        return found

    @property
    def kept_dtype(self) -> torch.dtype:
        """What is trained is kept in float32; a frozen base is kept as it is computed with."""
        return torch.float32 if self.settings.full else DTYPES[self.settings.dtype]

    def info(self) -> ModelInfo:
        settings = self.settings
        return ModelInfo(
            name=settings.name or Path(settings.model).name,
            arch=self.arch,
            tokenizer_id=settings.model,
            vocab_size=self.vocabulary,
            max_context=self.max_context,
            full=settings.full,
            max_lora_rank=settings.max_lora_rank,
            slots=1 if settings.full else settings.slots,
            parameters=self.parameters,
        )


def read(path: str, dtype: torch.dtype) -> PreTrainedModel:
    """A causal language model from a local folder or the local cache: safetensors only, and no code that it brings."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            attn_implementation=ATTENTION,
            experts_implementation="eager",
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError) as error:
        raise StrataError(Code.INVALID, f"cannot load the model {path}: {error}") from error
    assert isinstance(model, PreTrainedModel)
    return model


def without_dropout(lm: PreTrainedModel) -> None:
    """Chance belongs to no operation: the same pass gives the same numbers."""
    for module in lm.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def shard(packed: PackedModel, settings: RunnerSettings, ranks: Ranks) -> None:
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
            # The engine would average over the ranks. A loss is a sum, so its gradient is one too.
            module.set_gradient_divide_factor(1.0)
            # As a plain sum, which every backend knows.
            module.set_force_sum_reduction_for_comms(enable=True)


def try_out(base: Base, device: torch.device) -> None:
    """Two documents in one row must give what each gives alone, and what the model itself says.

    An architecture whose layers look over the border of a document, or that does something to its logits that we do not
    know of, would train on silently with wrong numbers; it is refused here. All ranks call this together.
    """
    generator = torch.Generator().manual_seed(0)
    lengths = [7, 5]
    tokens = torch.randint(base.vocabulary, (sum(lengths),), generator=generator).to(device)
    with torch.no_grad():
        together = base.logprobs(_row(tokens, lengths))
        alone = torch.cat([base.logprobs(_row(part, [len(part)])) for part in torch.split(tokens, lengths)])
        engine = base.logprobs(_row(tokens, lengths), by_engine=True)
    for other, what in ((alone, "neighbours in a row change a document"), (engine, "its logits are not plain ones")):
        apart = float((together - other).abs().max())
        if not math.isfinite(apart) or apart > TOLERANCE[base.settings.dtype]:
            raise StrataError(Code.UNSUPPORTED, f"{base.arch} cannot be trained here: {what} (off by {apart:.2g})")


def _row(tokens: torch.Tensor, lengths: list[int]) -> Row:
    places = torch.arange(len(tokens), device=tokens.device)
    return Row(tokens=tokens, documents=lengths, spans=(), places=places, targets=tokens)


def tokenizer_files(path: str) -> list[Path]:
    folder = Path(path)
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
    return [folder / name for name in names if (folder / name).is_file()]
