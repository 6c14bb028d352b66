"""Router replay: what samplers record, and what passes compute with it, beside unmodified transformers whose routers
are told by a hook what to choose.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from strata.train.core import commands, ops
from strata.train.core.model_options import LoraConfig, LossName
from strata.train.core.router_replay import PassRouting, encode_pass_routing
from strata.train.core.sampling import SampledRouting, SampledSequence, SampleResult
from strata.train.runner.collectives import RankGroup
from strata.train.runner.lora.targets import is_experts
from strata.train.runner.model.base import BaseModel
from strata.train.runner.model.replay_check import verify_router_replay
from strata.train.runner.model.tiny import TinyModel, make
from strata.train.runner.model.trained import local
from strata.train.runner.passes.logprobs import PackedRow
from strata.train.runner.router_replay import NOT_REPLAYED
from strata.train.runner.sampling.kv_cache import BLOCK
from tests.shell.train_runner import tiny_families
from tests.shell.train_runner.driver import datum
from tests.shell.train_runner.single_rank import driver_of
from tests.shell.train_sampler.replay_ranks import MESHES, told_row
from tests.shell.train_sampler.stage import BASE, Stage, ask, base_of, prompt_of, tokens_in
from tests.support.torchrun import run_on_ranks

FAMILIES: Final = ("deepseek_v3", "gpt_oss", "mixtral", "qwen3_moe")
CLOSE: Final = 2e-5
NOISE: Final = 0.1
"""The standard deviation of what is added to each input of the sampler's routers, which is about 1."""
LORA: Final = LoraConfig(rank=4)
LONGEST_S: Final = 200

pytestmark = pytest.mark.proves(
    "With router replay, passes of a mixture compute the tokens of a sample with the experts that it was drawn with"
)


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixtures")
    for family in FAMILIES:
        tiny_families.make(family, folder / family)
    make(folder / "wide", TinyModel(family="qwen3_moe", layers=3, experts=16, context=512))
    make(folder / "mesh", TinyModel(family="qwen3_moe", hidden=128, experts=8, context=512))
    make(folder / "dense", TinyModel(family="llama"))
    return folder


class Oracle:
    """The unmodified model. What its routers choose is read, or told to them; weights follow from their scores."""

    def __init__(self, path: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            str(path), dtype=torch.float32, experts_implementation="eager"
        )
        self.told: torch.Tensor | None = None
        self.chosen: list[torch.Tensor] = []
        blocks = [name.rpartition(".")[0] for name, module in self.model.named_modules() if is_experts(module)]
        for number, name in enumerate(blocks):
            block = self.model.get_submodule(name)
            router = next(getattr(block, each) for each in ("gate", "router") if hasattr(block, each))
            router.register_forward_hook(self._hook(number))

    def _hook(self, number: int) -> Any:
        def choose(router: Any, args: Any, output: Any) -> Any:
            del args
            logits, _, chosen = output
            if self.told is None:
                self.chosen.append(chosen)
                return None
            told = self.told[:, number]
            chosen = torch.where(told == NOT_REPLAYED, chosen, told)
            return logits, WEIGHTS[self.model.config.model_type](router, logits, chosen), chosen

        return choose

    def choices(self, tokens: Sequence[int]) -> torch.Tensor:
        """(tokens, layers, experts of a token)."""
        self.told, self.chosen = None, []
        with torch.no_grad():
            self.model(torch.tensor([tokens]))
        return torch.stack(self.chosen, dim=1)

    def loss(self, tokens: Sequence[int], told: torch.Tensor) -> torch.Tensor:
        """The sum over all tokens but the first."""
        self.told = told
        logits = self.model(torch.tensor([tokens])).logits[0].float()
        return cross_entropy(logits[:-1], torch.tensor(tokens[1:]), reduction="sum")

    def gradients(self, tokens: Sequence[int], told: torch.Tensor) -> dict[str, torch.Tensor]:
        self.model.zero_grad()
        self.loss(tokens, told).backward()  # type: ignore[no-untyped-call]
        return {name: value.grad for name, value in self.model.named_parameters() if value.grad is not None}


def _normalised(router: Any, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    weights: torch.Tensor = logits.float().softmax(-1).gather(1, chosen)
    return weights / weights.sum(-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else weights


def _of_deepseek(router: Any, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    weights: torch.Tensor = logits.sigmoid().gather(1, chosen)
    if router.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * float(router.routed_scaling_factor)


WEIGHTS: Final[dict[str, Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "deepseek_v3": _of_deepseek,
    "gpt_oss": lambda _, logits, chosen: logits.gather(1, chosen).softmax(-1),
    "mixtral": _normalised,
    "qwen3_moe": _normalised,
}


def experts_in(sequence: SampledSequence) -> torch.Tensor:
    """(tokens, layers, experts of a token)."""
    routing = sequence.routing
    assert routing is not None
    numbers = np.frombuffer(routing.experts, "<u2" if routing.wide else "u1").astype(np.int64)
    return torch.from_numpy(numbers.reshape(-1, routing.layers, routing.per_token))


def row_of(tokens: Sequence[int], told: torch.Tensor | None = None) -> PackedRow:
    """One document, of which the routing of the last token, which nothing comes after, may be missing."""
    count = len(tokens)
    if told is not None:
        rest = told.new_full((count - len(told), *told.shape[1:]), NOT_REPLAYED)
        told = torch.cat([told, rest]).to(torch.int32)
    ids = torch.tensor(tokens)
    return PackedRow(ids, [count], (), torch.arange(count - 1), ids[1:], routing=told)


def gradients_of(base: BaseModel, row: PackedRow) -> dict[str, torch.Tensor]:
    base.packed.zero_grad()
    (-base.logprobs(row).sum()).backward()  # type: ignore[no-untyped-call]
    return {name: local(value.grad) for name, value in base.lm.named_parameters() if value.grad is not None}


def distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Beside the length of theirs."""
    assert ours.keys() == theirs.keys()
    difference = sum(float((ours[name] - value).square().sum()) for name, value in theirs.items())
    return math.sqrt(difference / sum(float(value.square().sum()) for value in theirs.values()))


def perturb_routers(stage: Stage) -> None:
    """The sampler's routers alone see something else than they should, other noise at every call."""
    chance = torch.Generator().manual_seed(5)
    sampled = stage.sampler._model._lm
    for name, module in sampled.named_modules():
        if name.endswith(".gate"):
            module.register_forward_pre_hook(
                lambda _, args: (args[0] + NOISE * torch.randn(args[0].shape, generator=chance),)
            )


@pytest.mark.parametrize("prefix_tokens", [0, 8192], ids=["no prefix cache", "prefix cache"])
def test_samples_record_what_the_unmodified_routers_choose(
    mixtures: Path, ranks: RankGroup, prefix_tokens: int
) -> None:
    stage = Stage(base_of(mixtures / "wide", ranks), ranks, prefix_tokens=prefix_tokens)
    stage.sampler.open_base(BASE)
    oracle = Oracle(mixtures / "wide")
    shared = prompt_of(1, 2 * BLOCK)
    reused = 0
    for prompts in ([shared, prompt_of(7, 5)], [shared + prompt_of(2, 9), shared, prompt_of(8, 1)]):
        samples = {str(n): ask(each, num=2, max_tokens=6 + n, seed=n) for n, each in enumerate(prompts)}
        done = stage.slice(1, samples, routing=True)
        reused += done.reused_tokens
        while done.requests:
            done = stage.slice(3)
        for number, prompt in enumerate(prompts):
            outcome = stage.outcomes[str(number)]
            assert isinstance(outcome, SampleResult), outcome
            for sequence in outcome.sequences:
                tokens = [*tokens_in(prompt), *tokens_in(sequence)]
                recorded = experts_in(sequence)
                assert len(recorded) == len(tokens) - 1
                # The order of two experts of equal weight is no matter.
                assert torch.equal(recorded.sort(-1)[0], oracle.choices(tokens)[:-1].sort(-1)[0])
    assert reused == (3 * BLOCK if prefix_tokens else 0)


def test_requests_that_record_nothing_have_no_routing_and_share_a_batch(mixtures: Path, ranks: RankGroup) -> None:
    stage = Stage(base_of(mixtures / "wide", ranks), ranks)
    stage.sampler.open_base(BASE)
    sample = ask(prompt_of(1, 2 * BLOCK), max_tokens=8, seed=3)
    stage.slice(2, {"plain": sample})
    recorded = stage.all({"recorded": sample}, routing=True)["recorded"]
    plain = stage.outcomes["plain"]
    assert isinstance(plain, SampleResult)
    assert isinstance(recorded, SampleResult)
    assert plain.sequences[0].routing is None
    assert plain.sequences[0].tokens == recorded.sequences[0].tokens
    assert len(experts_in(recorded.sequences[0])) == 2 * BLOCK + 7, "not from blocks without routing"


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_and_all_gradients_are_those_of_the_unmodified_model_told_the_same(
    family: str, mixtures: Path, ranks: RankGroup
) -> None:
    base, oracle = base_of(mixtures / family, ranks, training="full"), Oracle(mixtures / family)
    assert verify_router_replay(base, ranks) == ""
    tokens = torch.randint(100, (23,), generator=torch.Generator().manual_seed(6)).tolist()
    own = oracle.choices(tokens)
    told = (own[:-4] + 1) % base.routers.experts
    rest = torch.full((4, *own.shape[1:]), NOT_REPLAYED)
    theirs = oracle.gradients(tokens, torch.cat([told, rest]))
    ours = gradients_of(base, row_of(tokens, told))
    assert distance(ours, theirs) < CLOSE
    assert any(float(value.abs().max()) > 0 for name, value in ours.items() if "gate" in name or "router" in name)
    # A test that would not see routing that is a token off would not see wrong routing.
    assert distance(gradients_of(base, row_of(tokens, told.roll(1, 0))), theirs) > 100 * CLOSE


@pytest.mark.parametrize("every", [0, 1])
def test_the_same_routing_changes_nothing(mixtures: Path, ranks: RankGroup, every: int) -> None:
    base = base_of(mixtures / "wide", ranks, training="full", activation_checkpointing=every)
    tokens = tokens_in(prompt_of(4, 40))
    plain = gradients_of(base, row_of(tokens))
    replayed = gradients_of(base, row_of(tokens, Oracle(mixtures / "wide").choices(tokens)))
    assert distance(replayed, plain) < 1e-6


def test_layers_that_are_recomputed_replay_the_routing_of_their_own_row(mixtures: Path, ranks: RankGroup) -> None:
    """The backward pass of the first row begins when the second was computed."""
    base = base_of(mixtures / "wide", ranks, training="full", activation_checkpointing=1)
    tokens = tokens_in(prompt_of(4, 40))
    told = (Oracle(mixtures / "wide").choices(tokens) + 3) % 16
    alone = gradients_of(base, row_of(tokens, told))
    base.packed.zero_grad()
    loss = -base.logprobs(row_of(tokens, told)).sum()
    with torch.no_grad():
        base.logprobs(row_of(tokens))
    loss.backward()  # type: ignore[no-untyped-call]
    found = {name: local(each.grad) for name, each in base.lm.named_parameters() if each.grad is not None}
    assert distance(found, alone) == 0.0


def test_a_perturbed_router_leaves_a_smaller_gap_and_no_error_of_the_gradient_with_replay(
    mixtures: Path, ranks: RankGroup, record_property: Callable[[str, object], None]
) -> None:
    base, oracle = base_of(mixtures / "wide", ranks, training="full"), Oracle(mixtures / "wide")
    stage = Stage(base, ranks)
    stage.sampler.open_full(BASE)
    perturb_routers(stage)
    gaps: tuple[list[float], list[float]] = [], []
    errors: tuple[list[float], list[float]] = [], []
    changed: list[float] = []
    for seed in range(8):
        prompt = prompt_of(seed, 12)
        outcome = stage.all({"it": ask(prompt, max_tokens=40, seed=seed)}, routing=True)["it"]
        assert isinstance(outcome, SampleResult), outcome
        (sequence,) = outcome.sequences
        tokens, told = [*tokens_in(prompt), *tokens_in(sequence)], experts_in(sequence)
        own = oracle.choices(tokens)
        changed.append(float((told.sort(-1)[0] != own[:-1].sort(-1)[0]).any(-1).float().mean()))
        theirs = oracle.gradients(tokens, torch.cat([told, own[-1:]]))
        drawn = torch.from_numpy(np.frombuffer(sequence.logprobs, "<f4").copy())
        for place, row in enumerate((row_of(tokens), row_of(tokens, told))):
            with torch.no_grad():
                trained = base.logprobs(row)[len(prompt) // 4 - 1 :]
            gaps[place].append(float((trained - drawn).abs().mean()))
            errors[place].append(distance(gradients_of(base, row), theirs))
    without, replayed = (float(np.mean(each)) for each in gaps)
    error, replayed_error = (float(np.mean(each)) for each in errors)
    figures = {"changed": np.mean(changed), "gap": (without, replayed), "error": (error, replayed_error)}
    record_property("router_replay", str(figures))
    print(figures)
    assert np.mean(changed) > 0.02
    assert replayed < without / 2
    assert replayed_error < CLOSE < 1000 * CLOSE < error


def test_tenants_share_a_row_and_each_replays_its_own(mixtures: Path, ranks: RankGroup, tmp_path: Path) -> None:
    """Two models in one pass, each with a datum that replays and one that does not, beside each datum alone."""
    driver = driver_of(ranks, mixtures / "wide", tmp_path)
    names = ("one", "two")
    for number, name in enumerate(names):
        create = ops.CreateModel(name, "tiny", LoraConfig(rank=4, seed=number), user_metadata={"router_replay": "true"})
        assert driver.do(commands.ManageModel(create)) == [ops.ModelCreated(name)]
    told = torch.randint(16, (9, 3, 2), generator=torch.Generator().manual_seed(1))
    told[..., 1] = (told[..., 0] + 1) % 16
    routing = SampledRouting(3, 2, told.numpy().astype("u1").tobytes())
    datums = {name: [datum(number, 12), datum(number + 9, 7)] for number, name in enumerate(names)}

    def item(name: str, numbers: Sequence[int]) -> commands.PassItem:
        chosen = [datums[name][number] for number in numbers]
        told = encode_pass_routing(PassRouting([routing if number == 0 else None for number in numbers]))
        data = ops.encode_pass_data(ops.PassData(chosen))
        return commands.PassItem(f"{name}:1", name, LossName.CROSS_ENTROPY, {}, data, told)

    def run(items: Sequence[commands.PassItem], counts: Sequence[int]) -> list[ops.PassResult]:
        row = [commands.Segment(item, number) for item, count in enumerate(counts) for number in range(count)]
        results = driver.do(commands.PassCommand(True, items, [[row]]))
        assert all(isinstance(each, ops.PassDone) for each in results), results
        return [ops.decode_pass_result(each.payload.data) for each in results]  # type: ignore[union-attr]

    together = run([item(name, (0, 1)) for name in names], (2, 2))
    for name, result in zip(names, together, strict=True):
        assert result.metrics["router_replay_tokens:sum"] == 9
        for number in (0, 1):
            (alone,) = run([item(name, [number])], [1])
            ours, theirs = (
                np.frombuffer(each.fields["logprobs"].data, "<f4")
                for each in (result.outputs[number], alone.outputs[0])
            )
            np.testing.assert_allclose(ours, theirs, atol=CLOSE)
    wrong = commands.PassItem("x", "one", LossName.CROSS_ENTROPY, {}, ops.encode_pass_data(ops.PassData(datums["one"])))
    for bad in (
        SampledRouting(4, 2, bytes(8)), SampledRouting(3, 2, bytes(5)), SampledRouting(3, 2, bytes(6 * 13)),
        SampledRouting(3, 2, b"\x10" * 6), SampledRouting(3, 2, bytes(12), wide=True),
    ):  # fmt: skip
        told_wrong = encode_pass_routing(PassRouting([bad, None]))
        planted = msgspec.structs.replace(wrong, routing=told_wrong)
        row = [commands.Segment(0, 0), commands.Segment(0, 1)]
        (failed,) = driver.do(commands.PassCommand(True, [planted], [[row]]))
        assert isinstance(failed, ops.Failed), failed
        assert "the recorded routing is not of" in failed.message


@pytest.mark.timeout(LONGEST_S + 20)
def test_ranks_of_all_groups_replay_what_the_unmodified_model_is_told(mixtures: Path, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    run_on_ranks("tests.shell.train_sampler.replay_ranks", 2, str(mixtures / "mesh"), str(out), within_s=LONGEST_S)
    found = json.loads(out.read_text(encoding="utf-8"))
    oracle, row = Oracle(mixtures / "mesh"), told_row(8, 2)
    assert row.routing is not None
    oracle.told = row.routing.long()
    with torch.no_grad():
        logits = oracle.model(row.tokens[None]).logits[0]
    theirs = logits[:-1].log_softmax(-1).gather(1, row.targets[:, None])[:, 0].numpy()
    assert found.keys() == MESHES.keys()
    assert "a tensor group" in found.pop("tensor")["problem"]
    for name, each in found.items():
        assert each["problem"] == "", name
        np.testing.assert_allclose(each["logprobs"], theirs, atol=CLOSE, err_msg=name)


def test_a_model_without_experts_refuses_it(mixtures: Path, ranks: RankGroup, tmp_path: Path) -> None:
    driver = driver_of(ranks, mixtures / "dense", tmp_path)
    create = ops.CreateModel("m", "tiny", LORA, user_metadata={"router_replay": "true"})
    (refused,) = driver.do(commands.ManageModel(create))
    assert isinstance(refused, ops.Failed)
    assert (refused.category, "llama has no experts" in refused.message) == ("user", True)


def test_routers_that_cannot_be_told_are_found_out(mixtures: Path, ranks: RankGroup) -> None:
    base = base_of(mixtures / "qwen3_moe", ranks)
    block: Any = next(module for name, module in base.lm.named_modules() if name.endswith(".mlp"))
    gate = block.gate.forward

    def choose_anew(hidden: torch.Tensor) -> Any:
        logits, weights, chosen = gate(hidden)
        return logits, weights, chosen.flip(0)

    block.gate.forward = choose_anew
    assert "they choose otherwise than they are told" in verify_router_replay(base, ranks)


def test_a_request_whose_routing_could_exceed_the_largest_result_is_refused(mixtures: Path, ranks: RankGroup) -> None:
    stage = Stage(base_of(mixtures / "wide", ranks), ranks)
    stage.sampler.open_base(BASE)
    stage.sampler._model.routers.layers = 1 << 20
    outcome = stage.all({"it": ask(prompt_of(1, 9), max_tokens=50)}, routing=True)["it"]
    assert "MiB is the most" in str(outcome)
