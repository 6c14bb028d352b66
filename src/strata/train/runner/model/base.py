"""The base model on a rank: order of loading, start-up check, LoRA hooks and sharding (FSDP), dtypes, activation
checkpointing, and copies for sampling.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from strata.base import log
from strata.base.errors import Code, StrataError
from strata.train.combinations import check_combination
from strata.train.core.commands import ModelInfo
from strata.train.core.model_options import LoraConfig, OptimizerName
from strata.train.families import ROWS, Rows, family_of, support_of
from strata.train.hugging_face import find_folder
from strata.train.images import find_image_form
from strata.train.plan.fused_kernels import check_fused_kernels
from strata.train.runner.collectives import RankGroup
from strata.train.runner.lora.adapter import Adapter
from strata.train.runner.lora.targets import require_targets, targets_of
from strata.train.runner.mesh import blocks_of, make_mesh
from strata.train.runner.model.compiled import compile_layers, keep_uncompiled, prepare_compiling
from strata.train.runner.model.expert_parallel import ExpertParallel
from strata.train.runner.model.fused_kernels import compute_row, kernel_errors, kernels_of, verify_agreement
from strata.train.runner.model.images import TowerEncoder
from strata.train.runner.model.loading import RankPart, auto_class, build_skeleton, load_lm, load_sharded, tie_skeleton
from strata.train.runner.model.process_memory import free_bytes, release_memory
from strata.train.runner.model.quantised import replace_layers
from strata.train.runner.model.startup_check import (
    Reference,
    compute_image_reference,
    compute_reference,
    find_decoder,
    find_rows,
    image_row,
    unsupported_errors,
    why_no_images,
)
from strata.train.runner.passes.logprobs import PackedModel, PackedRow
from strata.train.runner.router_replay import RouterReplay
from strata.train.runner.settings import RunnerSettings
from strata.train.settings import check_quantise_package

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
REDUCED_BYTES: Final = 4
"""Bytes of a gradient: they are summed in float32."""
FLOAT32_BYTES: Final = 2 << 30
"""A model whose files are up to this size is loaded a second time, in float32, for the start-up check."""
_log = log.get(__name__)


class BaseModel:
    """The loaded and sharded model. All ranks construct it together.

    It computes in evaluation mode, also in training: without dropout and without noise in routers, so that the same
    pass gives the same numbers.
    """

    def __init__(self, settings: RunnerSettings, ranks: RankGroup, rows: Rows = "packed") -> None:
        """Faster forms of rows than `rows` are not tried."""
        self.settings = settings
        with ranks.collective_errors():
            if problem := settings.parallel.problem(ranks.size):
                raise StrataError(Code.INVALID, problem)
            check_combination(settings.combination)
            check_quantise_package(settings.quantise)
            on_cuda = ranks.device.type == "cuda"
            check_fused_kernels(settings.fused_layers, settings.attention, settings.dtype, on_cuda=on_cuda)
            if settings.compile_folder is not None:
                prepare_compiling(settings.compile_folder)
            skeleton = build_skeleton(settings.model, self.storage_dtype)
            config = skeleton.config.to_dict()
            check_combination(msgspec.structs.replace(settings.combination, config=config))
            if problem := settings.parallel.shape_problem(config):
                raise StrataError(Code.UNSUPPORTED, problem)
        self.arch = str(skeleton.config.model_type)
        with unsupported_errors(self.arch):
            text = skeleton.config.get_text_config(decoder=True)
            self.vocabulary = int(text.vocab_size)
            self.max_context = longest_context(text)
            self.parameters = sum(parameter.numel() for parameter in skeleton.parameters())
            self.decoder = find_decoder(skeleton)
            if settings.quantise:
                replace_layers(skeleton, settings.quantise)
            size = sum(parameter.numel() * parameter.element_size() for parameter in skeleton.parameters())
            # A frozen base that is small is not sharded: every rank has all of it, and no pass has to gather it. Nor is
            # one of a single rank, which would only pay for the hooks of the sharding.
            is_whole = (size <= settings.replicated_bytes or ranks.size == 1) and not settings.offload
            is_replicated = not settings.full and settings.parallel.may_replicate and is_whole
            self.mesh = make_mesh(settings.parallel, ranks.shares, ranks.device, DTYPES[settings.dtype])
            self.packed = self._load_replicated(ranks, size) if is_replicated else self._load_sharded(ranks)
            self.lm, self.adapters = self.packed.lm, self.packed.adapters
            self.all_stages = self.lm if self.mesh.stage.is_only else tie_skeleton(skeleton, settings.model)
            """The model with the modules of all stages. It may have no memory."""
            self.images = find_image_form(settings.model, settings.combination)
            """How rows may have images, or why they have none."""
            self.routers = RouterReplay()
            # The references have to be computed before the model gets its hooks.
            reference = compute_reference(self._unmodified_logits, self.vocabulary, ranks.device)
            of_image = self._image_reference(ranks)
            self._add_hooks(self.lm)
            forms = ROWS[ROWS.index(rows) :] if self.lm._can_set_attn_implementation() else ROWS[-1:]
            if getattr(text, "attention_type", "") == "block_sparse":
                # Its code switches itself, for all that follows, to another attention after a short document.
                raise StrataError(Code.UNSUPPORTED, "its attention changes with the documents before")
            self.rows = find_rows(reference, self._checked_logprobs, settings.dtype, ranks, forms)
            """What is in a row."""
            if of_image is not None:
                compute = partial(self._checked_logprobs, form=self.rows)
                self.images = why_no_images(of_image, compute, settings.dtype, ranks) or self.images
            self._use_fused_kernels(reference.row, ranks)
            if not settings.full:
                require_targets(self.all_stages)

    def _image_reference(self, ranks: RankGroup) -> Reference | None:
        # The files of another host may be others, and all ranks compute the reference together.
        if ranks.all_reduce_any([isinstance(self.images, str)])[0] and not isinstance(self.images, str):
            self.images = "the files of another rank have no images"
        if isinstance(self.images, str):
            return None
        try:
            encoder = TowerEncoder(self.lm, self.images)
            row = image_row(self.images, self.vocabulary, ranks.device)
            with unsupported_errors(self.arch):
                reference = compute_image_reference(self._unmodified_logits, encoder, row)
        except StrataError as error:
            if error.code is not Code.UNSUPPORTED:
                raise
            self.images = error.message
            return None
        self.packed.images = encoder
        return reference

    def cut(self, lm: PreTrainedModel) -> None:
        """Leave the modules of this rank's stage, if there are stages."""
        self.mesh.stage.cut(lm, self.decoder)

    def _load_replicated(self, ranks: RankGroup, size: int) -> PackedModel:
        with ranks.collective_errors():
            lm = self._load_whole(ranks.device, size)
        lm.to(ranks.device)  # type: ignore[arg-type]
        lm.requires_grad_(requires_grad=False)
        return self._pack(lm)

    def _pack(self, lm: PreTrainedModel) -> PackedModel:
        return PackedModel(lm, self.decoder, self.mesh.stage, self.mesh.context, self.settings.logits_bytes)

    def _load_whole(self, device: torch.device, size: int) -> PreTrainedModel:
        path, quantise = self.settings.model, self.settings.quantise
        if not quantise and size <= self.settings.replicated_bytes:
            lm = load_lm(path, self.storage_dtype)
            for parameter in lm.parameters():
                # What was loaded lies in the file's own pages, and a server that sleeps could not give them back.
                parameter.data = parameter.data.clone()
            return lm
        # A large one is read to where it computes, tensor by tensor.
        return load_sharded(path, self.storage_dtype, device, RankPart(lambda _: None), quantise)

    def _load_sharded(self, ranks: RankGroup) -> PackedModel:
        """Each rank reads its shards and nothing else. The model is sharded before it has memory."""
        packed: PackedModel | None = None

        def distribute(lm: PreTrainedModel) -> None:
            nonlocal packed
            if not self.settings.full:
                lm.requires_grad_(requires_grad=False)
            self.mesh.split(lm)
            packed = self._pack(lm)
            self.mesh.shard(packed, offload=self.settings.offload)

        with ranks.collective_errors():
            path, quantise = self.settings.model, self.settings.quantise
            part = RankPart(distribute, self.settings.parallel.shards(ranks.size), self.cut)
            device = torch.device("cpu") if self.settings.offload else ranks.device
            lm = load_sharded(path, self.storage_dtype, device, part, quantise)
        if self.settings.offload:
            move_buffers(lm, ranks.device)
        assert packed is not None
        return packed

    def _add_hooks(self, lm: PreTrainedModel) -> None:
        compiles = self.settings.compile_folder is not None
        if not self.settings.full:
            self.adapters.add_hooks(lm, keep_uncompiled if compiles else lambda hook: hook)
        self.mesh.group_experts(lm, self.adapters, self.routers)
        if compiles:
            compile_layers(blocks_of(lm))
        if not self.settings.full and self.mesh.stage.is_first:
            # Then every layer takes part in the backward pass of every rank, whichever adapters its row has. Each layer
            # has a collective in the backward pass; a rank that left one out would wait for the others for ever.
            lm.enable_input_require_grads()  # type: ignore[no-untyped-call]
        if self.settings.activation_checkpointing:
            checkpoint_layers(lm, every=int(self.settings.activation_checkpointing), experts=self.mesh.experts)

    def _use_fused_kernels(self, row: PackedRow, ranks: RankGroup) -> None:
        """Each is compared with the plain path on all ranks before the next."""
        kernels = kernels_of(self.settings, self.lm)
        if not kernels:
            return
        first = blocks_of(self.lm)[0]
        plain = compute_row(self.logprobs, row, self.lm, first)
        for kernel in kernels:
            with kernel_errors(kernel):
                kernel.use()
                fused = compute_row(self.logprobs, row, self.lm, first)
            with ranks.collective_errors():
                logprobs, gradients = verify_agreement(kernel, fused, plain, self.settings.dtype)
            _log.info(
                "fused_kernel_verified", setting=kernel.setting, name=kernel.name, nats=logprobs, gradients=gradients
            )

    def new_adapter(
        self,
        config: LoraConfig,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        optimizer: OptimizerName = "adamw",
    ) -> Adapter:
        """An adapter for passes of this model. INVALID if the model does not have what is to be trained. Muon steps on
        whole matrices: each rank then holds those of split layers in full."""
        placement = self.mesh.adapters if optimizer == "adamw" else replace(self.mesh.adapters, part_holders=None)
        return Adapter(config, targets_of(self.all_stages, config), device, dtype, placement)

    def new_sampled_adapter(self, config: LoraConfig, device: torch.device) -> Adapter:
        """An adapter to sample with: each rank computes all layers, and holds the same experts as in passes. Ranks that
        are stages do not sample."""
        assert self.mesh.stage.is_only
        targets = targets_of(self.all_stages, config)
        return Adapter(config, targets, device, placement=self.mesh.sampled_adapters)

    def copy_for_sampling(self, adapter: Adapter) -> Adapter:
        """A copy of an adapter as it is now, to sample with. All ranks call it together: the parts of layers that are
        split over ranks are gathered."""
        copy = self.new_sampled_adapter(adapter.config, adapter.blocks[0].flat.device)
        if adapter.split is None:
            copy.install([block.flat for block in adapter.blocks])
            return copy
        gathered = [adapter.split.views(flat) for flat in self.mesh.tensor.gather(adapter.split.flat)]
        dimensions = {tensor.name: tensor.dimension for tensor in adapter.split.tensors}
        held = adapter.values()
        for name, value in copy.values().items():
            if name in dimensions:
                torch.cat([of_rank[name] for of_rank in gathered], dim=dimensions[name], out=value)
            else:
                value.copy_(held[name])
        return copy

    def logprobs(self, row: PackedRow) -> torch.Tensor:
        """Log probabilities of a packed row. All ranks call this together, those of a tensor or context group, and
        peers in other stages, with the same row. On other stages than the last, zeros.

        Without a backward pass, which would reshard them, gathered weights are resharded here; they would be stale
        after the next optimizer step.
        """
        context, count = self.mesh.context, len(row.targets)
        row, own = row.slice_for(context.rank, context.size)
        self.adapters.row = row.spans
        self.routers.row = row.routing
        logprobs = self.packed(row)
        if logprobs.requires_grad:
            logprobs.register_hook(partial(self.adapters.restore_row, row.spans))
            if self.routers.layers:
                logprobs.register_hook(partial(self.routers.restore_row, row.routing))
        if not torch.is_grad_enabled():
            self._reshard()
        assert isinstance(logprobs, torch.Tensor)
        return context.join(logprobs, own, count) if self.mesh.stage.is_last else logprobs

    def _checked_logprobs(self, row: PackedRow, form: Rows) -> torch.Tensor:
        """Log probabilities with this form of rows, on all stages, so that all of them decide alike."""
        with unsupported_errors(self.arch):
            self.packed.use_attention(own=form == "own attention")
            logprobs = self.logprobs(row)
        return self.mesh.stage.share(logprobs if self.mesh.stage.is_last else logprobs.new_zeros(len(row.targets)))

    def reduce_gradients(self, *, enabled: bool) -> None:
        """Sets whether the next backward pass reduces gradients over the ranks, or leaves its own to a later one.

        What is left is the gradient of every weight, in full on each rank. So only a small model leaves any.
        """
        small = self.parameters * REDUCED_BYTES <= self.settings.replicated_bytes
        if self.settings.full and small and isinstance(self.packed, FSDPModule):
            self.packed.set_requires_gradient_sync(enabled)

    def _unmodified_logits(self, document: torch.Tensor, **images: Any) -> torch.Tensor:
        with self.mesh.tensor.unsplit(), self.mesh.experts.unsplit():
            logits = self.packed.unmodified_logits(document, **images)
        self._reshard()
        return logits

    def _reshard(self) -> None:
        for module in self.packed.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @property
    def storage_dtype(self) -> torch.dtype:
        """Trained weights are stored in float32; a frozen base is stored in the dtype of the arithmetic."""
        compute = DTYPES[self.settings.dtype]
        return torch.promote_types(compute, torch.float32) if self.settings.full else compute

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
            one_document_per_row=self.rows != "packed",
        )


def import_architecture(path: str) -> None:
    """Import the code of a model's architecture, for processes that are forked later. They report what is wrong with
    the model, if anything is."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        auto_class(config)._model_mapping[type(config)]


def longest_context(config: PreTrainedConfig) -> int:
    longest = getattr(config, "max_position_embeddings", None)
    if not isinstance(longest, int):
        raise StrataError(Code.UNSUPPORTED, "its configuration has no max_position_embeddings")
    return longest


def checkpoint_layers(lm: PreTrainedModel, every: int, experts: ExpertParallel) -> None:
    """Activation checkpointing: every so many layers, one is recomputed in the backward pass. transformers does that
    only in training mode, so the mode is set for the layers, but not for the modules inside; a layer's own dropout is
    set to 0."""
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if experts.size > 1:
        options["context_fn"] = experts.checkpoint_contexts
    lm.gradient_checkpointing_enable(options)
    layers = [module for module in lm.modules() if isinstance(module, GradientCheckpointingLayer)]
    for number, module in enumerate(layers):
        module.gradient_checkpointing = number % every == 0
        if module.gradient_checkpointing:
            module.training = True
            for name, value in vars(module).items():
                if "drop" in name and isinstance(value, float):
                    setattr(module, name, 0.0)


def move_buffers(lm: PreTrainedModel, device: torch.device) -> None:
    for module in lm.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)


def load_base(settings: RunnerSettings, ranks: RankGroup) -> BaseModel:
    """Load and verify the base. In bfloat16, rounding hides small errors: if the model is small enough, the start-up
    check runs first in float32, on a copy that is then freed. It could also hide what a document does to its neighbour
    in a large model: families that are known for it, or were not compared, are not packed then."""
    rows = first_rows(settings)
    if settings.dtype == "bfloat16" and _affordable_in_float32(settings, ranks):
        # There is no fused attention in float32.
        precise = msgspec.structs.replace(settings, dtype="float32", attention="")
        rows = BaseModel(precise, ranks, rows).rows
        release_memory()
    base = BaseModel(settings, ranks, rows)
    if base.rows != "packed" and ranks.is_rank0:
        _log.info("one_document_per_row", family=base.arch, rows=base.rows)
    return base


def first_rows(settings: RunnerSettings) -> Rows:
    """Returns the fastest form of rows that the start-up check may find."""
    if (folder := find_folder(settings.model)) is None:
        return ROWS[0]
    family = support_of(family_of(folder))
    packs = settings.dtype != "bfloat16" or family.result == "equal"
    return family.rows if packs else max(family.rows, ROWS[1], key=ROWS.index)


def _affordable_in_float32(settings: RunnerSettings, ranks: RankGroup) -> bool:
    """Decides by the files in its folder, and by the free memory of every rank. The size of a model in the cache is
    unknown."""
    sizes = [file.stat().st_size for file in Path(settings.model).glob("*.safetensors")]
    # The files may be in float32 or in half of that.
    needed = (
        2 * sum(sizes) // (1 if sum(sizes) <= settings.replicated_bytes else ranks.size // settings.parallel.replicate)
    )
    free = free_bytes(ranks)
    affordable = 0 < sum(sizes) <= FLOAT32_BYTES and (free is None or 2 * needed <= free)
    return not ranks.all_reduce_any([not affordable])[0]


def tokenizer_files(path: str) -> list[Path]:
    folder = Path(path)
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
    return [folder / name for name in names if (folder / name).is_file()]
