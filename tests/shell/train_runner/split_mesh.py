"""Tensor, expert and context groups and stages of a pipeline: `torchrun … -m tests.shell.train_runner.split_mesh FOLDER
MESH DTYPE FAMILY …`.

MESH is one of `MESHES`. Rank 0 writes what was found. The losses, gradients and steps of a mesh are compared with those
of the unmodified model, or of PEFT's around it, that one process computes of all documents, one at a time: in float64,
or in float32 of experts, whose grouped multiplication has no float64. Then a full fine-tune of the first family is
saved on this mesh and read on others, and adapters of the last are trained and sampled through the dispatcher, as an
orchestrator would.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import numpy as np
import peft
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from strata.train.core import commands, model_options, ops
from strata.train.core.sampling import AddedSample, SampleOperation, SampleParams, SampleResult, SamplingSlice
from strata.train.parallel import ParallelSettings
from strata.train.runner.checkpoint.formats import to_peft
from strata.train.runner.collectives import RankGroup
from strata.train.runner.lora.adapter import Adapter
from strata.train.runner.lora.hooks import Span
from strata.train.runner.model.base import DTYPES, BaseModel
from strata.train.runner.model.pipeline_parallel import plan_steps
from strata.train.runner.model.tiny import Family, TinyModel, make
from strata.train.runner.model.trained import WEIGHTS, FullModel, LoraModel, local, own_slice
from strata.train.runner.model_runner import ModelRunner, run_interleaved
from strata.train.runner.passes.logprobs import PackedRow
from strata.train.runner.runner_dispatcher import RunnerDispatcher, follow
from strata.train.runner.settings import RunnerSettings
from tests.shell.train_runner import tiny_families
from tests.shell.train_runner.check_results import Found
from tests.shell.train_runner.checks_custom_loss import (
    preferences_have_the_gradient_of_the_client_side_way_in_one_pass_and_in_two,
)
from tests.shell.train_runner.checks_lora import (
    losses_logprobs_and_gradients_are_those_of_peft,
    neighbours_of_other_clients_change_nothing,
    rows_and_ranks_make_no_difference_and_outputs_keep_their_order,
    trained,
)
from tests.shell.train_runner.driver import Driver, Memory, apart, apart_by, batch, datum, dense, logprobs_of, loss_of
from tests.shell.train_runner.mesh import add_product, tie
from tests.shell.train_runner.resharding import (
    LORA,
    TRAININGS,
    Training,
    assert_held,
    data_rank,
    on_all_stages,
    reshard,
    whole_of,
)
from tests.shell.train_runner.shared_passes import company_changes_nothing
from tests.support.ranks import join_ranks

MUON = model_options.MuonParams(0.01)
ADAM = model_options.AdamParams(learning_rate=0.01, weight_decay=0.1, grad_clip_norm=0.5)
MESHES: Mapping[str, ParallelSettings] = {
    "2x2": ParallelSettings(shard=2, tensor=2),
    "1x4": ParallelSettings(tensor=4),
    "2x1x2": ParallelSettings(replicate=2, tensor=2),
    "2x2x2": ParallelSettings(replicate=2, shard=2, tensor=2),
    "experts 2x2": ParallelSettings(expert=2),
    "experts 1x4": ParallelSettings(expert=4),
    "experts 2x1x2": ParallelSettings(replicate=2, expert=2),
    "tensor 2 experts 2": ParallelSettings(shard=2, tensor=2, expert=2),
    "tensor 2 experts 4": ParallelSettings(shard=2, tensor=2, expert=4),
    "tensor 4 experts 4": ParallelSettings(tensor=4, expert=4),
    "replicate 2 tensor 2 experts 2": ParallelSettings(replicate=2, tensor=2, expert=2),
    "context 2x2": ParallelSettings(shard=2, context=2),
    "context 1x4": ParallelSettings(context=4),
    "context 2x1x2": ParallelSettings(replicate=2, context=2),
    "context 2x2x2": ParallelSettings(replicate=2, shard=2, context=2),
    "context 2 tensor 2": ParallelSettings(context=2, tensor=2),
    "context 2 experts 2": ParallelSettings(shard=2, context=2, expert=2),
    "context 2 experts 4": ParallelSettings(shard=2, context=2, expert=4),
    "context 2 tensor 2 experts 4": ParallelSettings(context=2, tensor=2, expert=4),
    "stages 2": ParallelSettings(pipeline=2),
    "stages 2x2": ParallelSettings(pipeline=2, shard=2),
    "stages 2x2x1": ParallelSettings(pipeline=2, replicate=2),
    "stages 4": ParallelSettings(pipeline=4),
    "stages 2 tensor 2": ParallelSettings(pipeline=2, tensor=2),
    "stages 2x2 tensor 2": ParallelSettings(pipeline=2, shard=2, tensor=2),
    "stages 2 context 2": ParallelSettings(pipeline=2, context=2),
}
DOCUMENTS = ((9, 14, 3, 5), (6, 1, 5), (11, 2, 7), (7,))
"""Their lengths in each of the rows, which the data ranks share: neither two nor four ranks divide the first and the
last row, both divide the others, and cut documents."""
WITH_EXPERTS = frozenset({"qwen3_moe", "gpt_oss", "deepseek_v3"})
EAGER = frozenset({"gpt_oss", "gemma2"})
"""Families whose sinks and soft-capping no kernel has."""
WITHOUT_PEFT = frozenset({"deepseek_v3"})
"""Families of which PEFT converts the targets before it adapts them. Plain LoRA layers around the linear ones of
attention and the head are compared."""
GROUP_RANKS = 8
"""At most so many ranks share a block, which may be longer by as many numbers."""
Dtype = Literal["float32", "float64"]


class SplitParity(msgspec.Struct):
    case: str
    loss: float
    """By how much the sum of log probabilities differs, by that sum."""
    gradient: float
    """By how much a gradient differs at most, by the largest of its tensor."""
    norm: float
    step: float
    """By how much a value differs after a step from the same gradients, by the largest of its tensor."""
    shards_equal: bool
    """Whether each rank has loaded its part of what the unmodified loader reads."""


class SplitFound(msgspec.Struct):
    parity: list[SplitParity]
    resharded: dict[str, bool]
    sampled: float
    """By how much the sampler's log probabilities of a prompt differ from those of a training pass."""


def packed_row(number: int, vocabulary: int, adapter: Adapter | None, device: torch.device | None = None) -> PackedRow:
    """Tokens have no target, one or two."""
    lengths = DOCUMENTS[number]
    places = torch.arange(sum(lengths), device=device)
    tokens = (places * (7 + number) + number) % vocabulary
    indices = places.repeat_interleave(places % 3)
    return PackedRow(
        tokens=tokens,
        documents=lengths,
        spans=[Span(adapter, len(tokens))] if adapter is not None else (),
        logit_indices=indices,
        targets=(torch.arange(len(indices), device=device) * 5 + 3) % vocabulary,
    )


def weigh(logprobs: torch.Tensor) -> torch.Tensor:
    """A loss in which every target counts differently."""
    return (logprobs * (1 + 0.5 * torch.sin(torch.arange(len(logprobs)))).to(logprobs.device)).sum()


class Oracle:
    """The unmodified model in this process, or PEFT's adapters around it. Its eager attention computes the softmax in
    float32, so it is not used where there is another."""

    def __init__(
        self, folder: Path, adapter: Adapter | None, values: Mapping[str, torch.Tensor], dtype: torch.dtype
    ) -> None:
        self.lm: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation="eager" if folder.name in EAGER else "sdpa",
            experts_implementation="eager",
        )
        self._dtype = dtype
        self.trained: dict[str, torch.Tensor] = dict(self.lm.named_parameters())
        if adapter is None:
            return
        if folder.name in WITHOUT_PEFT:
            self.trained = self._add_plain_layers(adapter)
        else:
            self.lm, self.trained = self._add_adapters_of_peft(adapter)
        with torch.no_grad():
            for name, value in to_peft(values).items():
                self.trained[name].copy_(value)

    def _add_plain_layers(self, adapter: Adapter) -> dict[str, torch.Tensor]:
        self.lm.requires_grad_(requires_grad=False)
        trained: dict[str, torch.Tensor] = {}
        for target in (each.name for each in adapter.targets):
            a, b = (torch.zeros(adapter.shapes[f"{target}.{part}"], dtype=self._dtype) for part in ("lora_A", "lora_B"))
            self.lm.get_submodule(target).register_forward_hook(add_product(a.requires_grad_(), b.requires_grad_()))
            trained |= {
                f"base_model.model.{target}.{part}.weight": each for part, each in (("lora_A", a), ("lora_B", b))
            }
        return trained

    def _add_adapters_of_peft(self, adapter: Adapter) -> tuple[Any, dict[str, torch.Tensor]]:
        config = peft.LoraConfig(
            r=LORA.rank,
            lora_alpha=int(LORA.alpha),
            target_modules=[each.name for each in adapter.targets if not each.experts],
            target_parameters=[each.name for each in adapter.targets if each.experts] or None,
        )
        adapted: Any = peft.get_peft_model(self.lm, config, autocast_adapter_dtype=False)
        parameters = adapted.named_parameters()
        return adapted, {name.replace(".default", ""): value for name, value in parameters if "lora_" in name}

    def loss(self, rows: Sequence[PackedRow]) -> float:
        total = torch.zeros((), dtype=self._dtype)
        for row in rows:
            documents = torch.split(row.tokens, list(row.documents))
            logits = torch.cat([self.lm(input_ids=each[None], use_cache=False).logits[0] for each in documents])
            total = total + weigh(torch.log_softmax(logits, dim=-1)[row.logit_indices, row.targets])
        total.backward()  # type: ignore[no-untyped-call]
        return float(total.detach())

    def gradients(self) -> dict[str, torch.Tensor]:
        gradients = {name: value.grad for name, value in self.trained.items()}
        return {name: gradient for name, gradient in gradients.items() if gradient is not None}

    def step(self, gradients: Mapping[str, torch.Tensor]) -> float:
        """A step of torch's own AdamW and clipping from these gradients; returns their norm."""
        values = list(self.trained.values())
        for name, value in self.trained.items():
            value.grad = gradients[name].clone()
        norm = float(torch.nn.utils.clip_grad_norm_(values, ADAM.grad_clip_norm))
        betas = (ADAM.beta1, ADAM.beta2)
        torch.optim.AdamW(
            values, lr=ADAM.learning_rate, betas=betas, eps=ADAM.eps, weight_decay=ADAM.weight_decay
        ).step()
        return norm


def compare(folder: Path, ranks: RankGroup, training: Training, mesh: str, dtype: Dtype) -> SplitParity:
    parallel = MESHES[mesh]
    dtype = "float32" if folder.name in WITH_EXPERTS else dtype
    settings = RunnerSettings(
        model=str(folder),
        training=training,
        sleep_folder=folder,
        dtype=dtype,
        # One of two layers is recomputed, and logits are computed of a few tokens at a time.
        activation_checkpointing=2,
        logits_bytes=5 * 4 * 512,
        parallel=parallel,
    )
    base = BaseModel(settings, ranks)
    adapter = None
    if not settings.full:
        lora = msgspec.structs.replace(LORA, train_mlp=folder.name not in WITHOUT_PEFT)
        adapter = base.new_adapter(lora, ranks.device, DTYPES[dtype])
        adapter.initialise("seed")
        # B begins with zeros, and A would have no gradient; nor would the head's, if all rows of its B were the same.
        added = adapter.views(0.01 * torch.sin(torch.arange(adapter.size, dtype=torch.float64)))
        for name, value in adapter.values().items():
            value.add_(adapter.take_own(name, added[name]).to(ranks.device))
        base.adapters.in_pass = [adapter]
        assert_held_once(adapter, base)
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype])
    equal = are_own_shards(base, ranks, dict(whole.named_parameters()))
    create = ops.CreateModel("m", "tiny", None if adapter is None else adapter.config)
    model = FullModel(create, base.packed, ranks) if adapter is None else LoraModel(create, adapter, ranks)
    values = whole_values(model, ranks) if isinstance(model, LoraModel) else {}
    oracle = Oracle(folder, adapter, values, DTYPES[dtype])
    few = compare_one_token(base, model, oracle, ranks) if isinstance(model, LoraModel) and parallel.expert > 1 else 0.0
    expected = oracle.loss([packed_row(number, base.vocabulary, None) for number in range(len(DOCUMENTS))])
    model.begin()
    numbers = range(data_rank(ranks, parallel), len(DOCUMENTS), parallel.data_ranks(ranks.size))
    rows = [packed_row(number, base.vocabulary, adapter, ranks.device) for number in numbers]
    total = compute_rows(base, rows)
    model.commit()
    gradients = gathered_gradients(model, ranks)
    worst = difference(gradients, oracle.gradients())
    norm = oracle.step(gradients)
    (result,) = run_interleaved([model.step(ADAM)])
    own = values_of(model, ranks)
    if isinstance(model, LoraModel) and not model.adapter.is_whole:
        assert_steps_of_muon(base, model, numbers, ranks)
    loss = total * base.mesh.is_first_of_row
    return SplitParity(
        f"{folder.name} {training} {mesh}",
        abs(float(ranks.start_all_reduce(loss)()) - expected) / abs(expected),
        max(worst, few),
        abs(result.grad_norm - norm) / norm,
        difference(own, {name: value.detach() for name, value in oracle.trained.items()}),
        equal,
    )


def are_own_shards(base: BaseModel, ranks: RankGroup, whole: Mapping[str, torch.Tensor]) -> bool:
    """Whether each rank has its part of the weights that it has, and each stage those of its layers and no others."""
    own = dict(base.lm.named_parameters())
    equal = all(
        isinstance(parameter, DTensor) and torch.equal(local(parameter), own_slice(whole[name].detach(), parameter))
        for name, parameter in own.items()
    )
    gathered = [
        msgspec.json.decode(data, type=list[str]) for data in ranks.all_gather_bytes(msgspec.json.encode([*own]))
    ]
    stages = gathered[:: base.settings.parallel.stage_ranks(ranks.size)]
    # A tied embedding is on the first and on the last stage, and the last is read after it.
    names = [name for number, each in enumerate(stages) for name in each if not number or name not in stages[0]]
    return equal and sorted(names) == sorted(whole) and (len(stages) == 1 or max(map(len, stages)) < len(whole))


def compute_rows(base: BaseModel, rows: Sequence[PackedRow]) -> torch.Tensor:
    """Forward and backward in the order of the schedule; returns the sum of the losses."""
    totals: dict[int, torch.Tensor] = {}
    for step in plan_steps(base.settings.parallel.pipeline, base.mesh.stage.number, len(rows)):
        if step.is_backward:
            totals[step.row].backward()  # type: ignore[no-untyped-call]
        else:
            totals[step.row] = weigh(base.logprobs(rows[step.row]))
    return torch.stack([total.detach() for total in totals.values()]).sum()


def gathered_gradients(model: FullModel | LoraModel, ranks: RankGroup) -> dict[str, torch.Tensor]:
    if isinstance(model, FullModel):
        gradients: dict[str, Any] = {name: parameter.grad for name, parameter in model.parameters.items()}
        return on_all_stages({name: gradient.full_tensor().cpu() for name, gradient in gradients.items()}, ranks)
    assert model.gradients is not None
    return to_peft(model.adapter.views(whole_of(model.adapter, model.own_shares(model.gradients), ranks)))


def values_of(model: FullModel | LoraModel, ranks: RankGroup) -> dict[str, torch.Tensor]:
    if isinstance(model, FullModel):
        values = {name: parameter.full_tensor().detach().cpu() for name, parameter in model.parameters.items()}
        return on_all_stages(values, ranks)
    return to_peft(whole_values(model, ranks))


def whole_values(model: LoraModel, ranks: RankGroup) -> dict[str, torch.Tensor]:
    """Of the whole adapter. Each rank holds its part of them."""
    values = model.adapter.views(whole_of(model.adapter, model.shares(optimizer=False)[WEIGHTS], ranks))
    assert_held(model.adapter, values)
    return values


def assert_held_once(adapter: Adapter, base: BaseModel) -> None:
    """Each rank of an expert group holds its part of the experts, each rank of a tensor group its part of the layers
    that the group splits, and all hold the same values of all other layers of their stage."""
    stage = base.mesh.stage
    sizes = [
        math.prod(shape) // _parts_of(name, shape, base)
        for name, shape in adapter.shapes.items()
        if stage.computes(name.rpartition(".")[0])
    ]
    assert stage.is_only or 0 < sum(sizes) < adapter.size
    assert base.mesh.tensor.size == 1 or sum(sizes) < 0.9 * adapter.size
    adapter.begin()
    for blocks in ([block.flat for block in adapter.blocks], adapter.take()):
        assert sum(sizes) <= sum(map(len, blocks)) < sum(sizes) + 3 * GROUP_RANKS


def _parts_of(name: str, shape: tuple[int, ...], base: BaseModel) -> int:
    """Of how many parts of a tensor a rank has one, by the placement of the layer's own weight on its group."""
    parallel = base.settings.parallel
    if len(shape) == 3:
        return parallel.expert
    if parallel.tensor == 1:
        return 1
    target, _, which = name.rpartition(".")
    weight = base.lm.get_parameter(f"{target}.weight")
    assert isinstance(weight, DTensor)
    assert weight.device_mesh.mesh_dim_names is not None
    placement = weight.placements[weight.device_mesh.mesh_dim_names.index("tensor")]
    return parallel.tensor if placement.is_shard(1 if which == "lora_A" else 0) else 1


def assert_steps_of_muon(base: BaseModel, trained: LoraModel, numbers: Sequence[int], ranks: RankGroup) -> None:
    """Each rank steps the matrices of its own experts, and those of all other layers of its stage in full; torch steps
    all matrices here."""
    dtype = trained.adapter.blocks[0].flat.dtype
    adapter = base.new_adapter(trained.adapter.config, ranks.device, dtype, "muon")
    whole = whole_values(trained, ranks)
    for name, value in adapter.values().items():
        value.copy_(adapter.take_own(name, whole[name]))
        assert value.ndim == 3 or value.shape == adapter.shapes[name]
    model = LoraModel(ops.CreateModel("muon", "tiny", adapter.config, optimizer="muon"), adapter, ranks)
    base.adapters.in_pass = [adapter]
    model.begin()
    compute_rows(base, [packed_row(number, base.vocabulary, adapter, ranks.device) for number in numbers])
    model.commit()
    assert model.gradients is not None
    flat = [
        whole_of(adapter, shares, ranks)
        for shares in (model.shares(optimizer=False)[WEIGHTS], model.own_shares(model.gradients))
    ]
    values, gradients = ([each for view in adapter.views(one).values() for each in _matrices(view)] for one in flat)
    parameters = [torch.nn.Parameter(value.clone()) for value in values]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    torch.optim.Muon(parameters, lr=MUON.learning_rate, weight_decay=0.0).step()  # type: ignore[no-untyped-call]
    (result,) = run_interleaved([model.step(MUON)])
    norm = float(flat[1].double().norm())
    assert abs(result.grad_norm - norm) <= 1e-5 * norm
    stepped = torch.cat([parameter.detach().flatten() for parameter in parameters])
    own = torch.cat([value.flatten() for value in whole_values(model, ranks).values()])
    # torch orthogonalises in bfloat16.
    assert float((own - stepped).abs().max()) <= 0.02 * float((stepped - flat[0]).abs().max())


def _matrices(view: torch.Tensor) -> Sequence[torch.Tensor]:
    return view.unbind() if view.ndim == 3 else [view]


def compare_one_token(base: BaseModel, model: LoraModel, oracle: Oracle, ranks: RankGroup) -> float:
    """By how much gradients differ of a row of one token. All other rows are the same token without an adapter: some
    ranks receive no pairs, or none of the adapter."""
    is_first = data_rank(ranks, base.settings.parallel) == 0
    zero = torch.zeros(1, dtype=torch.int64, device=ranks.device)
    span = Span(model.adapter if is_first else None, 1)
    row = PackedRow(tokens=zero, documents=[1], spans=[span], logit_indices=zero, targets=zero + 3)
    oracle.loss(
        [PackedRow(tokens=zero.cpu(), documents=[1], spans=(), logit_indices=zero.cpu(), targets=zero.cpu() + 3)]
    )
    model.begin()
    (base.logprobs(row).sum() * is_first).backward()  # type: ignore[no-untyped-call]
    model.commit()
    # Not by the largest of each tensor: attention to a single token has no gradient but rounding errors.
    worst = apart_by(oracle.gradients(), gathered_gradients(model, ranks))
    model.abort()
    for value in oracle.trained.values():
        value.grad = None
    return worst


def difference(own: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    assert own.keys() == expected.keys()
    return max(float((own[name] - value).abs().max() / value.abs().max()) for name, value in expected.items())


def drive(folder: Path, family: str, ranks: RankGroup, parallel: ParallelSettings) -> float:
    """Run checks of one rank on this mesh; returns by how much the sampler differs from training."""
    settings = RunnerSettings(
        model=str(folder / family),
        name=family,
        sleep_folder=folder / "asleep",
        row_tokens=4096,
        # Where the mesh allows it, every rank has all of the base. Samplers gather it at once, or layer by layer.
        replicated_bytes=0 if parallel.tensor > 1 and parallel.expert > 1 else 1 << 30,
        activation_checkpointing=2,
        parallel=parallel,
    )
    runner = ModelRunner(settings, ranks)
    if not ranks.is_rank0:
        follow(runner, ranks)
        return 0.0
    link = Memory()
    data_ranks = parallel.data_ranks(ranks.size)
    driver = Driver(RunnerDispatcher(runner, ranks, link, "tensor"), link, data_ranks, folder)
    found = Found(data_ranks, folder)
    losses_logprobs_and_gradients_are_those_of_peft(driver, found)
    neighbours_of_other_clients_change_nothing(driver, found)
    if parallel.pipeline > 1:
        neighbours_of_other_clients_change_nothing(driver, found, layout=apart)
        rows_and_ranks_make_no_difference_and_outputs_keep_their_order(driver, found)
        _train_head(driver)
    if parallel.expert > 1:
        # Adapters of tokens on other ranks, and adapters without experts.
        rows_and_ranks_make_no_difference_and_outputs_keep_their_order(driver, found)
        company_changes_nothing(driver, found)
    if data_ranks > 1:
        # Its groups are in rows of several ranks.
        preferences_have_the_gradient_of_the_client_side_way_in_one_pass_and_in_two(driver, found)
    off = _sample(driver) if parallel.pipeline == 1 else _fail_to_sample(driver)
    driver.dispatcher.run_once(commands.RankRequest(driver.generation, 1, commands.Shutdown()))
    return off


def _train_head(driver: Driver) -> None:
    """All stages but the last have nothing of this adapter."""
    lora = model_options.LoraConfig(rank=4, alpha=8.0, train_attn=False, train_mlp=False)
    for optimizer in get_args(model_options.OptimizerName):
        driver.create(optimizer, lora, optimizer=optimizer)
        before = loss_of(driver.train(optimizer, batch()))
        if optimizer == "adamw":
            driver.step(optimizer, learning_rate=0.02)
        else:
            driver.muon_step(optimizer, MUON)
        assert loss_of(driver.train(optimizer, batch(), forward_only=True)) < before
        state = driver.state(optimizer)
        assert isinstance(driver.save(optimizer, optimizer), ops.WeightsSaved)
        driver.train(optimizer, batch())
        assert isinstance(driver.load(optimizer, optimizer), ops.WeightsLoaded)
        assert apart_by(driver.state(optimizer), state) == 0
        driver.unload(optimizer)


def _sample(driver: Driver) -> float:
    prompt = datum(3, 12)
    model = trained(driver, "sampled")
    (computed,) = logprobs_of(driver.train(model, [_of_next_tokens(prompt)], forward_only=True))
    assert driver.do(commands.MakeSampler(ops.SaveSampler(model, 2, "copy"), "")) == [ops.SamplerOpened("copy")]
    operation = SampleOperation("copy", 0, prompt.tokens, SampleParams(max_tokens=2), 3, prompt_logprobs=True)
    driver.number += 1
    work = SamplingSlice(8, [AddedSample("copy:0", operation)])
    reply = driver.say(commands.DispatchCommand(driver.generation, driver.number, work, driver.number - 1))
    assert isinstance(reply, commands.DispatchReply)
    assert reply.sampled is not None
    (ended,) = reply.sampled.ended
    assert isinstance(ended.outcome, SampleResult), ended
    assert ended.outcome.prompt_logprobs is not None
    sampled = np.frombuffer(ended.outcome.prompt_logprobs, "<f4")[1:]
    return float(np.abs(sampled - computed[:-1]).max())


def _fail_to_sample(driver: Driver) -> float:
    model = trained(driver, "sampled")
    (refused,) = driver.do(commands.MakeSampler(ops.SaveSampler(model, 2, "copy"), ""))
    assert isinstance(refused, ops.Failed), refused
    assert "no rank has all layers" in refused.message
    return 0.0


def _of_next_tokens(prompt: ops.Datum) -> ops.Datum:
    following = np.roll(np.frombuffer(prompt.tokens, "<i4"), -1)
    return ops.Datum(prompt.tokens, {**prompt.inputs, "target_tokens": dense(following, ops.DType.I64)})


def build(folder: Path, family: str, parallel: ParallelSettings) -> None:
    """With as many key-value heads as there are ranks in a tensor group. The ranks of a context group share those of
    llama."""
    heads = (1 if family == "llama" else 2) * parallel.context if parallel.context > 1 else 2
    if family in get_args(Family):
        hidden = 32 * heads * parallel.tensor
        # Stages do not divide them.
        layers = parallel.pipeline + 1
        make(folder / family, TinyModel(family=family, hidden=hidden, experts=8, layers=layers))  # type: ignore[arg-type]
    else:
        # Each head of deepseek_v3 has keys and values of its own.
        shared = parallel.context == 1 and family != "deepseek_v3"
        changes = {"num_key_value_heads": parallel.tensor} if shared else {}
        tiny_families.make(family, folder / family, **changes)


def main(folder: Path, mesh: str, dtype: Dtype, families: list[str]) -> None:
    ranks = join_ranks(120)
    with ranks.collective_errors():
        if ranks.is_rank0:
            for family in families:
                build(folder, family, MESHES[mesh])
            if "llama" in families:
                tie(folder / "llama")
    parity = [compare(folder / family, ranks, training, mesh, dtype) for family in families for training in TRAININGS]
    others = {
        "one rank": ParallelSettings(replicate=ranks.size),
        "two shards": ParallelSettings(shard=2, replicate=ranks.size // 2),
    }
    resharded = reshard(folder, folder / families[0], ranks, {mesh: MESHES[mesh], **others})
    found = SplitFound(parity, resharded, drive(folder, families[-1], ranks, MESHES[mesh]))
    if ranks.is_rank0:
        (folder / "found.json").write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], msgspec.convert(sys.argv[3], Dtype), sys.argv[4:])
    # A rank that ends with the threads of its group aborts when the other rank has gone first.
    dist.destroy_process_group()
