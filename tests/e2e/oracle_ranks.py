"""Trains tiny models of several families on the ranks of one group, beside unmodified transformers and PEFT on rank 0:
`torchrun … -m tests.e2e.oracle_ranks PLAN RESULTS`.

The reference has eager attention, one document at a time, in float32, and torch's AdamW. Two adapters train in the same
rows; each is compared with its own reference. Of each family the largest differences are written.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import torch
import torch.distributed as dist
from peft import PeftModel
from safetensors.torch import load_file
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM

from strata.train.core import commands, ops
from strata.train.core.model_options import AdamParams, LoraConfig
from strata.train.parallel import ParallelSettings
from strata.train.runner.collectives import RankGroup
from strata.train.runner.model.base import DTYPES
from strata.train.runner.model_runner import ModelRunner
from strata.train.runner.runner_dispatcher import RunnerDispatcher, follow
from strata.train.runner.settings import RunnerSettings
from tests.shell.train_runner import tiny_families
from tests.shell.train_runner.driver import Driver, Memory, dense, logprobs_of, loss_of, outcome
from tests.support.ranks import join_ranks

STEPS: Final = 3
LENGTHS: Final = (41, 2, 23, 3, 60, 7)
"""Input tokens of the documents. The longest is longer than the windows and chunks of the tiny models."""
ADAM: Final = AdamParams(learning_rate=3e-3, eps=1e-3, weight_decay=0.01, grad_clip_norm=1.0)
"""The epsilon is not small beside gradients: a step does not enlarge differences of those that are nearly 0."""
LORA: Final = LoraConfig(rank=4, alpha=8.0)
WITHOUT_MLP: Final = frozenset({"deepseek_v3", "jamba", "nemotron_h"})
"""PEFT cannot load an adapter of their experts beside one of their other layers; those of nemotron_h have no gate."""


class Stage(msgspec.Struct, frozen=True):
    family: str
    parallel: ParallelSettings = ParallelSettings()
    training: Literal["lora", "full"] = "lora"
    dtype: Literal["float32", "bfloat16"] = "float32"


class Differences(msgspec.Struct):
    """The largest between the ranks and the reference."""

    family: str
    logprobs: float = 0.0
    """In nats: of each step, and after the last."""
    loss: float = 0.0
    """Of a pass, by its size."""
    rounding: float = 0.0
    """By how many nats the reference itself rounds in the dtype of the ranks: before the first step against float32; in
    float32, in each step against float64."""
    weights: float = 0.0
    """Of a trained weight after all steps, by the largest way that one has gone."""


Document = tuple[torch.Tensor, torch.Tensor]
"""Tokens, of which all but the first are targets, and a weight for each target."""


def documents(seed: int) -> list[Document]:
    chance = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randint(3, tiny_families.VOCABULARY, (length + 1,), generator=chance),
            torch.rand(length, generator=chance) * 2 - 0.3,
        )
        for length in LENGTHS
    ]


def datums(content: Sequence[Document]) -> list[ops.Datum]:
    return [
        ops.Datum(
            tokens[:-1].numpy().astype("<i4").tobytes(),
            {"target_tokens": dense(tokens[1:], ops.DType.I64), "weights": dense(weights, ops.DType.F32)},
        )
        for tokens, weights in content
    ]


class Reference:
    """Unmodified transformers, with PEFT's adapter or trained as a whole."""

    def __init__(
        self, folder: Path, adapter: Path | None, content: Sequence[Document], dtype: torch.dtype = torch.float32
    ) -> None:
        self._files = folder, adapter
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
        if dtype == torch.float64:
            # The kernel of grouped products has no float64.
            model.set_experts_implementation("eager")
        self.model = model if adapter is None else PeftModel.from_pretrained(model, str(adapter), is_trainable=True)
        self.model.eval()
        self._content = content
        self.trained = {name: each for name, each in self.model.named_parameters() if each.requires_grad}
        self.start = {name: each.detach().clone() for name, each in self.trained.items()}
        self._optimizer = torch.optim.AdamW(
            self.trained.values(),
            lr=ADAM.learning_rate,
            betas=(ADAM.beta1, ADAM.beta2),
            eps=ADAM.eps,
            weight_decay=ADAM.weight_decay,
        )

    def step(self) -> tuple[float, list[torch.Tensor]]:
        """The loss and the log probabilities before the step."""
        computed, total = [], 0.0
        for document in self._content:
            logprobs = self._logprobs(document)
            loss = -(document[1] * logprobs).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
            computed.append(logprobs.detach())
        clip_grad_norm_(self.trained.values(), ADAM.grad_clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total, computed

    @torch.no_grad()
    def logprobs(self) -> list[torch.Tensor]:
        return [self._logprobs(document) for document in self._content]

    def _logprobs(self, document: Document) -> torch.Tensor:
        tokens, _ = document
        logits = self.model(input_ids=tokens[None, :-1], use_cache=False).logits[0].float()
        return torch.log_softmax(logits, dim=-1).gather(1, tokens[1:, None])[:, 0]

    def rounding(self, dtype: torch.dtype) -> float:
        """The largest difference in log probabilities of the same model in another dtype, before the first step."""
        return largest_difference(self.logprobs(), Reference(*self._files, self._content, dtype).logprobs())

    def weight_differences(self, files: Mapping[str, torch.Tensor]) -> float:
        """Names of PEFT's parameters have the adapter's name, its files do not."""
        final = {name.replace(".default", ""): each for name, each in self.trained.items()}
        start = {name.replace(".default", ""): each for name, each in self.start.items()}
        missing = final.keys() - files.keys()
        assert not missing, sorted(missing)[:3]
        way = max(float((value - start[name]).abs().max()) for name, value in final.items())
        assert way > ADAM.learning_rate / 2, way
        return max(float((value - files[name].float()).abs().max()) for name, value in final.items()) / way


class Beside:
    """One model of the ranks, and its reference."""

    def __init__(self, driver: Driver, model: Path, name: str, number: int, *, full: bool) -> None:
        self.name, self.driver = name, driver
        self.content = documents(number)
        if full:
            driver.create(name, None)
            self._begin(model, None)
            return
        lora = msgspec.structs.replace(
            LORA, rank=LORA.rank * (number + 1), seed=number, train_mlp=model.name not in WITHOUT_MLP
        )
        # A step, after which B is not zero; then a model with these weights and a new optimizer.
        driver.create("first", lora)
        driver.train("first", datums(documents(number + 7)))
        driver.step("first", learning_rate=2e-2, eps=1e-3)
        files(driver, "first", f"{name}-peft", "sampler_weights")
        files(driver, "first", f"{name}-start", "weights")
        driver.unload("first")
        driver.create(name, lora)
        loaded = driver.load(name, f"{name}-start", optimizer=False)
        assert isinstance(loaded, ops.WeightsLoaded), loaded
        self._begin(model, driver.folder / f"{name}-peft")

    def _begin(self, model: Path, adapter: Path | None) -> None:
        self.reference = Reference(model, adapter, self.content)
        self.exact = Reference(model, adapter, self.content, torch.float64)

    def final_weights(self) -> dict[str, torch.Tensor]:
        return files(self.driver, self.name, f"{self.name}-final", "sampler_weights")


def largest_difference(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    return max(float((own - their).abs().max()) for own, their in zip(ours, theirs, strict=True))


def files(driver: Driver, model: str, name: str, kind: str) -> dict[str, torch.Tensor]:
    saved = driver.save(model, name, kind)
    assert isinstance(saved, ops.WeightsSaved), saved
    return {
        key: value for file in (driver.folder / name).glob("*.safetensors") for key, value in load_file(file).items()
    }


def compare(driver: Driver, stage: Stage, model: Path) -> Differences:
    full = stage.training == "full"
    models = [Beside(driver, model, f"m{number}", number, full=full) for number in range(1 if full else 2)]
    found = Differences(stage.family)
    if stage.dtype != "float32":
        found.rounding = max(each.reference.rounding(DTYPES[stage.dtype]) for each in models)

    def compare_logprobs(result: ops.PassResult, expected: Sequence[torch.Tensor]) -> None:
        for ours, theirs in zip(logprobs_of(result), expected, strict=True):
            found.logprobs = max(found.logprobs, float((torch.from_numpy(ours.copy()) - theirs).abs().max()))

    for _ in range(STEPS):
        results = driver.passes(*((each.name, datums(each.content)) for each in models))
        for each, result in zip(models, results, strict=True):
            loss, logprobs = each.reference.step()
            compare_logprobs(outcome(result), logprobs)
            if stage.dtype == "float32":
                found.rounding = max(found.rounding, largest_difference(logprobs, each.exact.step()[1]))
            found.loss = max(found.loss, abs(loss_of(outcome(result)) - loss) / max(1.0, abs(loss)))
            driver.step(each.name, **msgspec.structs.asdict(ADAM))
    results = driver.passes(*((each.name, datums(each.content)) for each in models), forward_only=True)
    for each, result in zip(models, results, strict=True):
        compare_logprobs(outcome(result), each.reference.logprobs())
        if not full:
            found.weights = max(found.weights, each.reference.weight_differences(each.final_weights()))
        driver.unload(each.name)
    return found


def run(stage: Stage, number: int, folder: Path, ranks: RankGroup) -> Differences | None:
    model = folder / stage.family
    with ranks.collective_errors():
        if ranks.is_rank0 and not model.exists():
            tiny_families.make(stage.family, model)
    settings = RunnerSettings(
        model=str(model),
        name=stage.family,
        training=stage.training,
        dtype=stage.dtype,
        parallel=stage.parallel,
        sleep_folder=folder / "asleep",
        row_tokens=4096,
        slots=2,
    )
    runner = ModelRunner(settings, ranks)
    if not ranks.is_rank0:
        follow(runner, ranks)
        return None
    link, data_ranks = Memory(), stage.parallel.data_ranks(ranks.size)
    driver = Driver(RunnerDispatcher(runner, ranks, link, "oracle"), link, data_ranks, folder / f"files-{number}")
    found = compare(driver, stage, model)
    driver.dispatcher.run_once(commands.RankRequest(driver.generation, 1, commands.Shutdown()))
    return found


def main(plan: Path, results: Path) -> None:
    warnings.simplefilter("ignore")
    ranks = join_ranks(300)
    stages = msgspec.json.decode(plan.read_bytes(), type=list[Stage])
    found = [run(stage, number, plan.parent, ranks) for number, stage in enumerate(stages)]
    if ranks.is_rank0:
        results.write_bytes(msgspec.json.encode(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
