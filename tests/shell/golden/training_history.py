"""A history of the training server with a fact, an operation and a result of every kind.

The same calls give the same facts, so the journal of a release can be written again byte for byte.
"""

from __future__ import annotations

import array
from typing import Any, Final

import msgspec

from strata.train.core import model_options, ops
from strata.train.core.client_commands import (
    AddEndpoint,
    Command,
    CreateCustomLoss,
    DeleteCheckpoint,
    FinishSession,
    ImportCheckpoint,
    OpenSession,
    PublishCheckpoint,
    RemoveEndpoint,
    ResolveReplay,
    SetCheckpointTtl,
    SubmitOperation,
)
from strata.train.core.commands import SnapshotWritten
from strata.train.core.inputs import (
    ClientCommand,
    CommitSnapshot,
    CompareReplay,
    CompleteDispatch,
    CompletePush,
    CompleteRouted,
    CompleteSlice,
    CompleteSnapshotCopy,
    Decision,
    DeleteExpiredCheckpoints,
    ExpireResults,
    Input,
    RanksAttached,
    RejectSnapshot,
    RequestTurn,
    RequeueRouted,
    RouteSamples,
    TakeTurn,
)
from strata.train.core.loss_graph import CustomLoss, LossGraph, LossInput, LossNode
from strata.train.core.replay_differences import RankNumerics, ReplayDifferences
from strata.train.core.sampling import SampleOperation, SampleParams
from strata.train.core.state import DeviceSide, Dispatch
from tests.core.train.servers import LORA, TENANT, Server, forward_backward, step

STREAM: Final = "train/default"
START_S: Final = 1_790_000_000.0
SESSION: Final = f"session-{TENANT}"
RULES: Final[dict[str, Any]] = {
    "base_models": ("tiny",),
    "initial_checkpoint": False,
    "snapshot_s": 60.0,
    "route": True,
    "result_ttl_s": 3600.0,
    "ended_session_ttl_s": 3600.0,
    "max_kept_results": 1000,
}
PROMPT: Final = array.array("i", [1, 2, 3]).tobytes()
ROUTED: Final = SampleParams(max_tokens=8)
AT_RANKS: Final = SampleParams(max_tokens=8, seed=1, stop_tokens=(0,), stop_strings=("\n",), temperature=0.5, top_k=4)
MEAN_REF: Final = {"ref": "mean"}
MEAN: Final = CustomLoss(
    "mean",
    [LossInput("logprobs", 1)],
    LossGraph(
        [
            LossNode("placeholder", "logprobs", "logprobs"),
            LossNode("call_method", "mean", "mean", [{"ref": "logprobs"}]),
            LossNode(
                "output",
                "output",
                "output",
                [{"tuple": [{"ref": "mean"}, {"dict": {"custom/mean:mean": {"ref": "mean"}}}]}],
            ),
        ]
    ),
)
RESULTS: Final[dict[type[ops.Operation], ops.Result]] = {
    ops.ForwardBackward: ops.PassDone(ops.InlinePayload(b"logprobs")),
    ops.OptimStep: ops.StepDone({"grad_norm": 0.5}),
    ops.AbortGradients: ops.GradientsAborted(),
    ops.SaveWeights: ops.WeightsSaved("tinker://saved"),
    ops.LoadWeights: ops.WeightsLoaded("tinker://saved"),
    ops.SaveSampler: ops.SamplerOpened("sampler"),
    ops.SyncWeights: ops.WeightsSaved("tinker://saved"),
    ops.OpenSampler: ops.SamplerOpened("sampler"),
    ops.UnloadModel: ops.ModelUnloaded("model"),
    ops.CreateModel: ops.ModelCreated("model"),
    ops.Sleep: ops.Asleep(1 << 20),
    ops.Wake: ops.Awake(),
}


class History(Server):
    """Each input is one batch of the journal."""

    def __init__(self) -> None:
        super().__init__(**RULES)
        self.batches: list[list[bytes]] = []
        self.now_s = START_S

    def ask(self, given: Input) -> Decision:
        before = len(self.journal)
        decision = super().ask(given)
        if len(self.journal) > before:
            self.batches.append(self.journal[before:])
        return decision

    def command(self, command: Command, tenant: str = TENANT) -> None:
        self.now_s += 1.0
        self.ask(ClientCommand(tenant, command, self.now_s))

    def submit(self, operation: ops.Operation, session: str = SESSION) -> None:
        self.command(SubmitOperation(operation, session))

    def complete(self, dispatch: Dispatch) -> None:
        """The ranks do what they were told."""
        self.now_s += 1.0
        if dispatch.snapshot:
            self.ask(CompleteSnapshotCopy(dispatch.number, None))
            return
        operations = [self.future(each).operation for each in dispatch.future_ids]
        if dispatch.slice is not None:
            ended = [(each, ops.SampleDone(ops.InlinePayload(b"sampled"), 8)) for each in list(self.state.sampling)[:1]]
            self.ask(CompleteSlice(dispatch.number, ended, len(self.state.sampling) - len(ended), self.now_s))
            return
        results = [RESULTS[type(each)] for each in operations if each is not None]
        self.ask(CompleteDispatch(dispatch.number, results, self.now_s, 0.25))

    def run(self) -> None:
        """Everything that can run. A sample ends with each slice."""
        while (dispatch := self.dispatch()) is not None:
            self.complete(dispatch)

    def snapshot(self, trouble: str | None = None) -> int:
        """The snapshot that is due is taken, and all of it is durable."""
        self.now_s += RULES["snapshot_s"]
        dispatch = self.dispatch()
        assert dispatch is not None
        assert dispatch.snapshot
        self.complete(dispatch)
        digest = f"{dispatch.number:064x}"
        self.ask(CommitSnapshot(SnapshotWritten(1, dispatch.number, digest, 4096, 0.1, 0.5, trouble), self.now_s))
        return dispatch.number


def training_history() -> list[list[bytes]]:
    """Returns the batches of a stream, oldest first."""
    history = History()
    history.ask(RanksAttached("group-1"))
    history.command(OpenSession(SESSION, ("tag",), {"purpose": "test"}, "0.38.0"))
    model = _train(history)
    _snapshot(history, model)
    _save(history, model)
    _sample(history, model)
    _publish(history, model)
    _lose_ranks(history, model)
    _end_sessions(history)
    _take_turns(history)
    history.snapshot()
    # What is left open is what a later version goes on with: a dispatch in flight, and operations that wait.
    history.submit(forward_backward(model, _next(history, model)))
    history.submit(step(model, _next(history, model)))
    assert history.dispatch() is not None
    history.submit(forward_backward(model, _next(history, model), (2, 3)))
    _compare(history, model)
    return history.batches


def _take_turns(history: History) -> None:
    """Engines get the devices, and ranks get them back. Only a server with the setting has such facts."""
    rules = history.state.rules
    history.state.rules = msgspec.structs.replace(rules, device_turn_s=60.0)
    turns: list[tuple[DeviceSide, str]] = [("engines", history.state.group), ("ranks", "")]
    for side, group in turns:
        history.now_s += 60.0
        history.ask(RequestTurn(history.now_s, frozenset({side})))
        turn = history.state.current_turn
        assert turn is not None
        history.ask(TakeTurn(turn.number, history.now_s, group))
    history.state.rules = rules


def _next(history: History, model: str) -> int:
    return history.state.models[model].line.wanted


def _train(history: History) -> str:
    model, other = f"{SESSION}:train:0", f"{SESSION}:train:1"
    schedule = model_options.Schedule("cosine", 2, 10, 0.1)
    history.submit(ops.CreateModel(model, "tiny", LORA, schedule, {"of": "golden"}))
    history.submit(ops.CreateModel(other, "tiny", LORA, optimizer="muon"))
    history.run()
    history.command(CreateCustomLoss(f"{SESSION}:loss:0", MEAN))
    stored = ops.StoredPayload("0" * 64, 1 << 20)
    history.submit(forward_backward(model, 1, (3, 5)))
    history.submit(forward_backward(other, 1, (4,), payload=stored, sampled_tokens=2))
    history.submit(forward_backward(model, 2, (3,), loss=model_options.LossName.CUSTOM, config={ops.GROUP_SIZE: 1.0}))
    history.submit(forward_backward(model, 3, (3,), forward_only=True))
    history.submit(step(model, 4))
    history.submit(ops.OptimStep(other, 2, None, model_options.MuonParams(0.02)))
    history.submit(ops.AbortGradients(model, 5))
    history.submit(ops.MalformedOperation(model, 6, "it cannot be read"))
    history.run()
    return model


def _snapshot(history: History, model: str) -> None:
    """One is committed, one could not be written, and one is damaged."""

    def change() -> None:
        history.submit(step(model, _next(history, model)))
        history.run()

    history.snapshot()
    change()
    history.snapshot("the disk is full")
    history.now_s += RULES["snapshot_s"]
    number = history.snapshot()
    history.ask(RejectSnapshot(number, "it is not as it was written"))
    change()
    history.snapshot()


def _save(history: History, model: str) -> None:
    def save(name: str, kind: ops.WeightsKind = "weights", ttl_s: float | None = None) -> None:
        history.submit(ops.SaveWeights(model, _next(history, model), kind, name, ttl_s=ttl_s))
        history.run()

    save("kept")
    save("short", ttl_s=60.0)
    save("unwanted")
    save("exported", "external_weights")
    history.submit(ops.LoadWeights(model, _next(history, model), model, "weights", "kept", optimizer=True))
    history.run()
    history.command(PublishCheckpoint(model, "weights", "kept", public=True))
    history.command(SetCheckpointTtl(model, "weights", "kept", 1e9))
    history.command(DeleteCheckpoint(model, "weights", "unwanted"))
    history.command(ImportCheckpoint("import-0", "brought", "import-1", "tiny", LORA))
    history.now_s += 60.0
    history.ask(DeleteExpiredCheckpoints(history.now_s))


def _sample(history: History, model: str) -> None:
    base, own = f"{SESSION}:sample:0", f"{SESSION}:sample:1"
    history.submit(ops.OpenSampler(base, "tiny"))
    history.submit(ops.SaveSampler(model, _next(history, model), own))
    history.run()
    for seq in range(2):
        history.submit(SampleOperation(base, seq, PROMPT, AT_RANKS, num_samples=2, topk_prompt_logprobs=2))
    history.submit(SampleOperation(own, 0, PROMPT, AT_RANKS, stream=True))
    history.run()


def _publish(history: History, model: str) -> None:
    """Weights go to two endpoints. Of three samples one ends there, one goes to the ranks, and one is tried again."""
    for name, address in (("first", "192.0.2.1"), ("second", "192.0.2.2"), ("gone", "192.0.2.3")):
        history.command(AddEndpoint(name, f"http://{name}:8000", "vllm", address))
    history.command(RemoveEndpoint("gone"))
    history.submit(ops.SyncWeights(model, _next(history, model), "pushed"))
    history.run()
    (path,) = history.state.pushes
    outcomes = [ops.EndpointOutcome("first", ok=True, seconds=0.5), ops.EndpointOutcome("second", False, 1.0, "down")]
    history.ask(CompletePush(path, outcomes, history.now_s))
    sampler = f"{SESSION}:sample:2"
    history.submit(ops.OpenSampler(sampler, "tiny", ops.SavedWeights(model, "sampler_weights", "pushed")))
    history.run()
    for seq in range(3):
        history.submit(SampleOperation(sampler, seq, PROMPT, ROUTED))
    while history.ask(RouteSamples(8)).facts:
        pass
    done, failed, again = history.state.routed
    history.ask(CompleteRouted(done, ops.SampleDone(ops.InlinePayload(b"sampled"), 8), history.now_s))
    history.ask(RequeueRouted(failed))
    history.ask(RequeueRouted(again, again=True))
    history.run()
    history.ask(RouteSamples(8))


def _lose_ranks(history: History, model: str) -> None:
    history.submit(forward_backward(model, _next(history, model)))
    dispatch = history.dispatch()
    assert dispatch is not None
    history.give_up(dispatch.number, "the ranks died of it twice")
    history.ask(RanksAttached("group-2", RankNumerics("2 ranks", "float32", deterministic=True)))
    for action in ("accept", "roll_back"):
        _compare(history, model)
        history.command(ResolveReplay(model, action))
        history.run()
        history.submit(step(model, _next(history, model)))
        history.run()
    for operation in (ops.Sleep(), ops.Wake()):
        history.submit(operation)
        history.run()
    history.submit(step(model, _next(history, model)))
    history.run()


def _compare(history: History, model: str) -> None:
    """A replay differed: the model is stopped."""
    last = history.state.dispatched
    found = ReplayDifferences(2, 1, 0.5, 0.25, 0.125, above=last, stops_at=last)
    history.ask(CompareReplay("group-2", last, {model: found}, history.now_s))


def _end_sessions(history: History) -> None:
    """A session with nothing in it is finished and forgotten; a model of another one is unloaded."""
    history.command(OpenSession("empty"), "bob")
    history.command(FinishSession("empty", "done"), "bob")
    history.submit(ops.UnloadModel(f"{SESSION}:train:1"))
    history.run()
    history.now_s += RULES["ended_session_ttl_s"]
    history.ask(ExpireResults(history.now_s))
