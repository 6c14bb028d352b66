"""A fake of the ranks: the full protocol of `strata.train.core.commands`, toy arithmetic, no torch.

A fake model is one number. Every pass adds to its gradient what its datums and the number give, every step changes the
number, and every result depends on it: an operation that is executed twice, skipped or reordered shows in all later
results. The fake passes the same conformance suite as the real ranks. The `config` of a pass can inject faults:
`pretend_s` takes that long, `pretend_death` kills the process, `pretend_hang` never ends.

As a process: `python -m tests.support.fake_ranks --settings FILE [--applied FILE]`.
"""

from __future__ import annotations

import argparse
import array
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import assert_never

import msgspec

from strata import __version__
from strata.base import log
from strata.base.digest import sha256_hex
from strata.base.errors import StrataError
from strata.base.failpoint import arm, failpoint, kill
from strata.train.core import commands, inflight, ops
from strata.train.core.commands import PassItem
from strata.train.core.pack import unpack
from strata.train.core.replay_differences import RankNumerics
from strata.train.core.router_replay import decode_pass_routing
from strata.train.core.sampling import (
    DrawnPart,
    DrawnSequence,
    Draws,
    EndedSample,
    SampledPart,
    SampledRouting,
    SampledSequence,
    SampleFailed,
    SampleOperation,
    SampleResult,
    SamplingSlice,
    SliceResult,
    TargetLogprobs,
    Targets,
    VersionSpan,
)
from strata.train.link.rank import RankLink
from strata.train.settings import ServerSettings, load_settings

MAX_CONTEXT = 4096
VOCABULARY = 97
SNAPSHOT = "ranks.json"


@dataclass
class FakeModel:
    weight: float = 0.0
    gradient: float = 0.0
    steps: int = 0
    asleep: bool = False


class FakeSnapshot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that later work depends on."""

    models: dict[str, FakeModel]
    samplers: dict[str, float]
    versions: dict[str, int] = {}


class FakeWeights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    weight: float
    steps: int


@dataclass
class FakeSequence:
    sample: SampleOperation
    remaining: int
    """Tokens that are still to be sampled."""
    weights: str
    drawn: dict[int, DrawnSequence]
    """What was drawn so far, if its weights are in flight."""
    resumed: bool
    routing: bool = False
    """Whether its routing is recorded."""


Single = commands.SaveState | commands.LoadState | commands.ManageModel | commands.MakeSampler


@dataclass
class FakeRanks:
    """A rank group as rank 0 presents it. `handle` has no side effects beyond this object and checkpoint folders."""

    settings: ServerSettings
    group: str
    applied_log: Path | None = None
    """Every executed operation is appended here, a line each."""
    generation: int = 0
    run_id: str | None = None
    applied: int = 0
    models: dict[str, FakeModel] = field(default_factory=dict)
    replies: dict[int, commands.DispatchReply] = field(default_factory=dict)
    samplers: dict[str, float] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    """Of in-flight weights, which are among the samplers."""
    sampling: dict[str, FakeSequence] = field(default_factory=dict)
    written: commands.SnapshotWritten | None = None
    outbox: list[commands.FromRank] = field(default_factory=list)
    """Messages that are sent unsolicited, after the reply."""
    stopped: bool = False
    off_devices: bool = False
    """They sleep because engines have their devices."""
    out_of_memory: bool = False
    """Every pass fails for lack of memory."""
    version: str = __version__
    noise: float = 0.0
    """What is added to each log probability of a replayed pass."""
    takes_s: float | None = None
    """How long a dispatch takes by their own report; measured unless set."""

    def handle(self, message: commands.ToRank) -> commands.FromRank:
        refusal = self._refusal(message)
        if refusal is not None:
            return commands.Fenced(self.generation, refusal)
        match message:
            case commands.Attach():
                self.generation, self.run_id = message.generation, message.run_id
                ranks = self.settings.by_device.nproc
                data_ranks = self.settings.parallel.data_ranks(ranks)
                return commands.AttachReply(
                    self.generation,
                    self.group,
                    ranks,
                    self.applied,
                    self._info(),
                    self.written,
                    data_ranks=data_ranks,
                    version=self.version,
                    numerics=RankNumerics(f"{ranks} pretended ranks", "float32", self.settings.ranks.deterministic),
                )
            case commands.Restore():
                return self._restore(message)
            case commands.DispatchCommand():
                return self._execute_once(message)
            case commands.RankRequest():
                self.stopped = isinstance(message.work, commands.Shutdown)
                if isinstance(message.work, commands.YieldDevices | commands.TakeDevices):
                    self.off_devices = isinstance(message.work, commands.YieldDevices)
                return commands.HealthReply(self.generation, message.ask_id, [*range(self.settings.by_device.nproc)])
            case _:
                assert_never(message)

    def _refusal(self, message: commands.ToRank) -> str | None:
        if message.generation < self.generation:
            return f"generation {message.generation} is over, it is {self.generation} now"
        if isinstance(message, commands.Attach):
            other = self.applied and message.run_id != self.run_id
            return f"these ranks belong to the run {self.run_id!r}" if other else None
        if message.generation > self.generation:
            return "attach first"
        match message:
            case commands.Restore() if self.applied:
                return f"dispatch {self.applied} was applied already: there is nothing to restore"
            case commands.DispatchCommand(number=number) if number <= self.applied and number not in self.replies:
                return f"the reply of dispatch {number} is not kept"
            case _:
                return None

    def _info(self) -> commands.ModelInfo:
        model = self.settings.model
        return commands.ModelInfo(
            name=model.base_model,
            arch="pretended",
            tokenizer_id=model.base_model,
            vocab_size=VOCABULARY,
            max_context=MAX_CONTEXT,
            full=model.training == "full",
            max_lora_rank=model.max_lora_rank,
            slots=model.slots,
            parameters=1,
        )

    def _execute_once(self, command: commands.DispatchCommand) -> commands.DispatchReply:
        self.replies = {number: reply for number, reply in self.replies.items() if number > command.durable}
        if command.number > self.applied:
            started_s = time.perf_counter()
            sampled = self._sample_slice(command.work) if isinstance(command.work, SamplingSlice) else None
            if isinstance(command.work, commands.TakeSnapshot):
                results: Sequence[ops.Result] = self._take_snapshot(command.number, Path(command.work.path))
                tokens = 0
            else:
                results, tokens = (
                    self._execute(command.work) if not isinstance(command.work, SamplingSlice) else ((), 0)
                )
            took_s = time.perf_counter() - started_s if self.takes_s is None else self.takes_s
            timing = _timing(command.work, took_s, tokens)
            self.replies[command.number] = commands.DispatchReply(
                self.generation, command.number, results, timing, sampled
            )
            self.applied = command.number
        return msgspec.structs.replace(self.replies[command.number], generation=self.generation)

    def _execute(self, work: commands.PassCommand | commands.StepsCommand | Single) -> tuple[Sequence[ops.Result], int]:
        if isinstance(work, commands.PassCommand):
            self._record(f"{item.request_id} replayed" if work.replayed else item.request_id for item in work.items)
            if self.out_of_memory:
                return [ops.Failed("user", "out of memory", memory=True)] * len(work.items), 0
            return self._pass(work)
        if isinstance(work, commands.StepsCommand):
            self._record(f"{operation.model_id}:{operation.seq_id}" for operation in work.operations)
            return [self._step(operation) for operation in work.operations], 0
        operation = work.operation
        name = getattr(operation, "model_id", "")
        self._record([f"{name}:{getattr(operation, 'seq_id', type(operation).__name__)}"])
        try:
            return [self._operation(work)], 0
        except StrataError as error:
            return [ops.Failed("server", str(error))], 0

    def _record(self, operations: Iterable[str]) -> None:
        if self.applied_log is not None:
            with self.applied_log.open("a", encoding="utf-8") as file:
                file.writelines(f"{self.group} {operation}\n" for operation in operations)

    # Passes

    def _pass(self, work: commands.PassCommand) -> tuple[Sequence[ops.Result], int]:
        batches = [ops.decode_pass_data(item.data).datums for item in work.items]
        problem = self._rows_problem(work, batches)
        if problem:
            return [ops.Failed("server", problem)] * len(work.items), 0
        for item in work.items:
            _inject_fault(item)

        def row_outputs(row: commands.Row) -> list[array.array[float]]:
            noise = self.noise if work.replayed else 0.0
            return [
                self._logprobs(work.items[segment.item].model_id, batches[segment.item][segment.datum], noise)
                for segment in row
            ]

        # Outputs are in the order of the rows, as on the real ranks, and are then unpacked.
        ordered = unpack(work.rows, [[row_outputs(row) for row in rank] for rank in work.rows])
        results = [self._result(item, ordered[number], work) for number, item in enumerate(work.items)]
        return results, sum(datum.length for datums in batches for datum in datums)

    def _rows_problem(self, work: commands.PassCommand, batches: Sequence[Sequence[ops.Datum]]) -> str:
        """Why the rows are not a packing of the batch; empty if they are."""
        expected = sorted((item, datum) for item, datums in enumerate(batches) for datum in range(len(datums)))
        packed = sorted((segment.item, segment.datum) for rank in work.rows for row in rank for segment in row)
        if expected != packed or len({len(rank) for rank in work.rows}) != 1:
            return "the rows are not those of the batch"
        return f"rows for {len(work.rows)} ranks" if len(work.rows) != self.settings.by_device.nproc else ""

    def _logprobs(self, model_id: str, datum: ops.Datum, noise: float = 0.0) -> array.array[float]:
        weight = self.models[model_id].weight if model_id in self.models else 0.0
        tokens = array.array("i", datum.tokens)
        return array.array("f", [-(0.1 + token % VOCABULARY / VOCABULARY) * (1.0 + weight) + noise for token in tokens])

    def _result(self, item: PassItem, outputs: list[array.array[float]], work: commands.PassCommand) -> ops.Result:
        model = self.models.get(item.model_id)
        if model is None or model.asleep:
            return ops.Failed("user", f"there is no model {item.model_id!r}, or it sleeps")
        replayed = _replayed_experts(item)
        loss = sum(replayed) / VOCABULARY - sum(sum(logprobs) for logprobs in outputs)
        if not work.forward_only:
            model.gradient += loss
        tensors = [ops.Dense(ops.DType.F32, (len(logprobs),), logprobs.tobytes()) for logprobs in outputs]
        metrics = {"loss:sum": loss, "tokens:sum": float(sum(map(len, outputs)))}
        if replayed:
            metrics["router_replay_tokens:sum"] = float(len(replayed))
        result = ops.PassResult([ops.DatumOutput({"logprobs": tensor}) for tensor in tensors], metrics)
        return ops.PassDone(ops.InlinePayload(ops.encode_pass_data(result)))

    # Other operations

    def _operation(self, work: Single) -> ops.Result:
        match work:
            case commands.SaveState():
                return self._save(work.operation, Path(work.path))
            case commands.LoadState():
                return self._load(work.operation, Path(work.path))
            case commands.MakeSampler():
                return self._make_sampler(work)
            case commands.ManageModel():
                return self._manage(work)
            case _:
                assert_never(work)

    def _step(self, operation: ops.OptimStep) -> ops.Result:
        model = self.models.get(operation.model_id)
        if model is None:
            return ops.Failed("user", f"there is no model {operation.model_id!r}")
        if model.asleep:
            return ops.Failed("server", ops.ASLEEP)
        norm = abs(model.gradient)
        model.weight -= operation.params.learning_rate * model.gradient
        model.gradient = 0.0
        model.steps += 1
        return ops.StepDone({"step": float(model.steps), "weight": model.weight, "grad_norm": norm})

    def _save(self, operation: ops.SaveWeights, folder: Path) -> ops.Result:
        model = self.models.get(operation.model_id)
        if model is None:
            return ops.Failed("user", f"there is no model {operation.model_id!r}")
        if not folder.exists():
            temporary = folder.with_name(f".{folder.name}.part")
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            (temporary / "weights.json").write_bytes(msgspec.json.encode(FakeWeights(model.weight, model.steps)))
            # The publisher checks for these files before it pushes the folder to an engine.
            for name in ("adapter_config.json", "config.json"):
                (temporary / name).write_bytes(b"{}")
            temporary.rename(folder)
        return ops.WeightsSaved(f"tinker://{operation.model_id}/{operation.kind}/{operation.name}")

    def _load(self, operation: ops.LoadWeights, folder: Path) -> ops.Result:
        model = self.models.get(operation.model_id)
        if model is None or not (folder / "weights.json").exists():
            return ops.Failed("user", "there is no such model or checkpoint")
        saved = msgspec.json.decode((folder / "weights.json").read_bytes(), type=FakeWeights)
        model.weight, model.gradient = saved.weight, 0.0
        model.steps = saved.steps if operation.optimizer else 0
        return ops.WeightsLoaded(f"tinker://{operation.run_id}/{operation.kind}/{operation.name}")

    def _make_sampler(self, work: commands.MakeSampler) -> ops.Result:
        for evicted in work.close:
            self.samplers.pop(evicted, None)
            self.versions.pop(evicted, None)
        operation = work.operation
        weight = 0.0
        if isinstance(operation, ops.SaveSampler):
            if operation.model_id not in self.models:
                return ops.Failed("user", f"there is no model {operation.model_id!r}")
            weight = self.models[operation.model_id].weight
            if operation.inflight:
                return self._publish(operation, weight)
            if work.path:
                unnamed = ops.SaveWeights(operation.model_id, operation.seq_id, "sampler_weights", "unnamed")
                self._save(unnamed, Path(work.path))
        elif operation.weights is not None:
            file = Path(work.path) / "weights.json"
            if not file.exists():
                return ops.Failed("user", "there is no such checkpoint")
            weight = msgspec.json.decode(file.read_bytes(), type=FakeWeights).weight
        self.samplers[operation.sampler_id] = weight
        return ops.SamplerOpened(operation.sampler_id)

    def _publish(self, operation: ops.SaveSampler, weight: float) -> ops.Result:
        name = inflight.weights_name(operation.model_id)
        self.samplers[name], self.versions[name] = weight, operation.seq_id
        return ops.SamplerOpened(operation.sampler_id)

    # Snapshots

    def _take_snapshot(self, number: int, folder: Path) -> Sequence[ops.Result]:
        if any(model.asleep for model in self.models.values()):
            return [ops.Failed("user", "the server sleeps")]
        failpoint("pretended.snapshot.copied")
        data = msgspec.json.encode(FakeSnapshot(self.models, self.samplers, self.versions))
        temporary = folder.with_name(f".{folder.name}.part")
        temporary.mkdir(parents=True)
        (temporary / SNAPSHOT).write_bytes(data)
        failpoint("pretended.snapshot.before_name")
        temporary.rename(folder)
        failpoint("pretended.snapshot.before_told")
        self.written = commands.SnapshotWritten(self.generation, number, sha256_hex(data), len(data), 0.0, 0.0)
        self.outbox.append(self.written)
        return []

    def _restore(self, message: commands.Restore) -> commands.Restored:
        failpoint("pretended.snapshot.restore")
        file = Path(message.path) / SNAPSHOT
        data = file.read_bytes() if file.exists() else b""
        if sha256_hex(data) != message.digest:
            return commands.Restored(self.generation, message.number, f"{file} is not as it was written", damaged=True)
        snapshot = msgspec.json.decode(data, type=FakeSnapshot)
        self.models, self.samplers, self.applied = snapshot.models, snapshot.samplers, message.number
        self.versions = snapshot.versions
        self._record([f"restored:{message.number}"])
        return commands.Restored(self.generation, message.number)

    # Sampling

    def _sample_slice(self, work: SamplingSlice) -> SliceResult:
        """One token a step; the tokens follow from the prompt, the sampler and the seed."""
        ended: list[EndedSample] = []
        self._record(f"{added.request_id}:added" for added in work.add)
        for added in work.add:
            tokens = added.sample.params.max_tokens or 1
            if added.weights_name not in self.samplers:
                ended.append(EndedSample(added.request_id, SampleFailed("user", "there is no such sampler")))
            else:
                begun = max((each.length for each in added.drawn.values()), default=0)
                drawn = dict(added.drawn)
                running = FakeSequence(
                    added.sample, tokens - begun, added.weights_name, drawn, bool(drawn), added.routing
                )
                self.sampling[added.request_id] = running
        cancelled = [request_id for request_id in work.cancel if self.sampling.pop(request_id, None) is not None]
        ended += [EndedSample(each, SampleFailed("cancelled", "it was cancelled")) for each in cancelled]
        before = len(self.sampling)
        drawn_parts: dict[str, list[DrawnPart]] = {}
        for request_id, running in list(self.sampling.items()):
            parts = self._draw(running, min(work.steps, running.remaining)) if running.weights in self.versions else []
            running.remaining -= work.steps
            if running.remaining <= 0:
                del self.sampling[request_id]
                ended.append(EndedSample(request_id, self._result_of(running)))
                continue
            if parts:
                drawn_parts[request_id] = parts
            if running.sample.stream:
                streamed = [(request_id, part) for part in self._sampled_parts(running, work.steps)]
                self.outbox.append(commands.SampleProgress(self.generation, streamed))
        left = len(self.sampling)
        steps = before * work.steps
        return SliceResult(ended, left, left, 0, MAX_CONTEXT - left, MAX_CONTEXT, steps, 0, drawn=drawn_parts)

    def _draw(self, running: FakeSequence, count: int) -> list[DrawnPart]:
        """What so many steps add to each sequence of an in-flight sample."""
        start = (running.sample.params.max_tokens or 1) - running.remaining
        span = VersionSpan(self.versions[running.weights], count, running.resumed)
        running.resumed = False
        parts = []
        place = slice(4 * start, 4 * (start + count))
        for index, each in enumerate(self._sample_result(running.sample, running.weights).sequences):
            added = DrawnSequence(each.tokens[place], each.logprobs[place], (span,))
            running.drawn[index] = running.drawn.get(index, DrawnSequence()).plus(added)
            parts.append(DrawnPart(index, start, added))
        return parts

    def _result_of(self, running: FakeSequence) -> SampleResult:
        result = self._sample_result(running.sample, running.weights, running.routing)
        if not running.drawn:
            return result
        drawn = [running.drawn[index] for index in range(running.sample.num_samples)]
        sequences = [SampledSequence(each.tokens, each.logprobs, "length", None, each.versions) for each in drawn]
        return msgspec.structs.replace(result, sequences=sequences)

    def _sampled_parts(self, running: FakeSequence, steps: int) -> Iterable[SampledPart]:
        """The tokens of the last so many steps."""
        end = (running.sample.params.max_tokens or 1) - running.remaining
        start = max(end - steps, 0)
        for index, sequence in enumerate(self._sample_result(running.sample, running.weights).sequences):
            tokens, logprobs = sequence.tokens[4 * start : 4 * end], sequence.logprobs[4 * start : 4 * end]
            yield SampledPart(index, start, tokens, logprobs)

    def _sample_result(self, sample: SampleOperation, weights: str, routing: bool = False) -> SampleResult:
        prompt = array.array("i", sample.prompt)
        weight = self.samplers[weights]
        sequences = []
        for index in range(sample.num_samples):
            first = sum(prompt) + (sample.params.seed or 0) + index
            tokens = array.array("i", [(first + step) % VOCABULARY for step in range(sample.params.max_tokens or 1)])
            logprobs = array.array("f", [-1.0 - weight] * len(tokens))
            recorded = SampledRouting(1, 1, bytes([*prompt, *tokens][:-1])) if routing else None
            sequences.append(SampledSequence(tokens.tobytes(), logprobs.tobytes(), "length", routing=recorded))
        unscored = 1 if sample.prompt_logprobs_last_n is None else len(prompt) - sample.prompt_logprobs_last_n
        scores = array.array("f", [*[float("nan")] * unscored, *[-1.0] * (len(prompt) - unscored)]).tobytes()
        return SampleResult(
            sequences,
            scores if sample.prompt_logprobs else None,
            targets=None if sample.targets is None else _fake_targets(sample.targets),
            draws=_fake_draws(sample) if sample.prompt_draws else None,
        )

    def _manage(self, work: commands.ManageModel) -> ops.Result:
        operation = work.operation
        match operation:
            case ops.CreateModel():
                limit = max(self.settings.model.max_models, self.settings.model.slots)
                if len(self.models) >= limit:
                    return ops.Failed("user", f"the limit of {limit} models is reached; unload one first")
                self.models[operation.model_id] = FakeModel()
                return ops.ModelCreated(operation.model_id)
            case ops.UnloadModel():
                self.models.pop(operation.model_id, None)
                return ops.ModelUnloaded(operation.model_id)
            case ops.AbortGradients():
                if operation.model_id not in self.models:
                    return ops.Failed("user", f"there is no model {operation.model_id!r}")
                self.models[operation.model_id].gradient = 0.0
                return ops.GradientsAborted()
            case ops.Sleep() | ops.Wake():
                for model in self.models.values():
                    model.asleep = isinstance(operation, ops.Sleep)
                return ops.Asleep(0) if isinstance(operation, ops.Sleep) else ops.Awake()
            case _:
                assert_never(operation)


def _timing(work: commands.Work, total_s: float, tokens: int) -> commands.Timing:
    is_pass = isinstance(work, commands.PassCommand)
    return commands.Timing(
        total_s,
        forward_s=total_s / 2 if is_pass else 0.0,
        backward_s=total_s / 2 if isinstance(work, commands.PassCommand) and not work.forward_only else 0.0,
        tokens=tokens,
        optimizer_s=total_s if isinstance(work, commands.StepsCommand) else 0.0,
        publish_s=total_s if isinstance(work, commands.Publishing) else 0.0,
    )


def _fake_targets(targets: Targets) -> TargetLogprobs:
    tokens = array.array("i", targets.tokens)
    return TargetLogprobs(array.array("f", [0.0 if token < 0 else -1.0 for token in tokens]).tobytes(), targets.layout)


def _fake_draws(sample: SampleOperation) -> Draws:
    length, k = sample.length - 1, sample.prompt_draws
    tokens = array.array("i", [number % VOCABULARY for number in range(length * k)])
    return Draws(tokens.tobytes(), array.array("f", [-1.0] * (length * k)).tobytes(), k, length)


def _replayed_experts(item: PassItem) -> bytes:
    """All experts that a pass replays: a fake has one for each token."""
    routing = decode_pass_routing(item.routing).datums if item.routing else ()
    return b"".join(each.experts for each in routing if each is not None)


def _inject_fault(item: PassItem) -> None:
    if item.config.get("pretend_death"):
        os.kill(os.getpid(), signal.SIGKILL)
    if item.config.get("pretend_hang"):
        signal.pause()
    if item.config.get("pretend_s"):
        time.sleep(item.config["pretend_s"])


def serve(ranks: FakeRanks, link: RankLink) -> None:
    while not ranks.stopped:
        message = link.receive()
        if message is not None:
            link.send(ranks.handle(message))
            while ranks.outbox:
                link.send(ranks.outbox.pop(0))


def main() -> int:
    parser = argparse.ArgumentParser(description="A fake of the ranks, for tests.")
    parser.add_argument("--settings", type=Path, required=True)
    parser.add_argument("--applied", type=Path)
    parser.add_argument("--die-at", metavar="FAILPOINT", help="kill the process at this failpoint")
    parser.add_argument("--short-of-memory", action="store_true", help="fail every pass for lack of memory")
    parser.add_argument("--noise", type=float, default=0.0, help="add this to the log probabilities of replayed passes")
    parser.add_argument("--version", default=__version__, help="pretend to run this version of Strata")
    options = parser.parse_args()
    if options.die_at:
        arm(options.die_at, kill)
    settings = load_settings(options.settings)
    log.configure("json", settings.server.log_level)
    link = RankLink(settings)
    try:
        ranks = FakeRanks(settings, os.urandom(8).hex(), options.applied, out_of_memory=options.short_of_memory)
        ranks.version, ranks.noise = options.version, options.noise
        serve(ranks, link)
    finally:
        link.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
