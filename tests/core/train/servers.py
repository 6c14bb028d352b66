"""The orchestrator's core driven by hand, with ranks that do what they are told in order and count what they did."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import pytest

from strata.base.errors import StrataError
from strata.train.core import facts, model_options, ops
from strata.train.core.client_commands import (
    AbortOperation,
    Accepted,
    FinishSession,
    OpenSession,
    SubmitOperation,
)
from strata.train.core.future import OperationFuture
from strata.train.core.inputs import (
    ClientCommand,
    CompleteDispatch,
    CompleteSnapshotCopy,
    Decision,
    Dispatching,
    DispatchNext,
    FailDispatch,
    Input,
)
from strata.train.core.lookup import find_future
from strata.train.core.machine import TrainMachine
from strata.train.core.state import Dispatch, Rules, TrainState

TENANT: Final = "alice"
LORA: Final = model_options.LoraConfig(rank=4)


def forward_backward(model_id: str, seq: int, lengths: Sequence[int] = (3,), **fields: Any) -> ops.ForwardBackward:
    given: dict[str, Any] = {"loss": model_options.LossName.CROSS_ENTROPY, "config": {}, "forward_only": False}
    given["payload"] = ops.InlinePayload(b"x")
    return ops.ForwardBackward(model_id=model_id, seq_id=seq, lengths=lengths, **(given | fields))


def step(model_id: str, seq: int, rate: float = 1e-4) -> ops.OptimStep:
    return ops.OptimStep(model_id=model_id, seq_id=seq, adam=model_options.AdamParams(learning_rate=rate))


class Server:
    """One orchestrator's core. Its journal is a list; a restart reads a snapshot, or the journal from its beginning."""

    def __init__(self, **rules: Any) -> None:
        given: dict[str, Any] = {"initial_checkpoint": False, "base_models": ("tiny",)}
        self.machine = TrainMachine(Rules(**(given | rules)))
        self.state: TrainState = self.machine.initial()
        self.journal: list[bytes] = []
        self.now_s = 1_000.0
        self.ranks = 2
        self.max_context = 1_000

    def ask(self, given: Input) -> Decision:
        self.machine.observe(self.state, given, 0.0)
        encoded, outcome = self.machine.decide(self.state, given, 0.0)
        self.machine.observe_outcome(self.state, given, outcome, 0.0)
        for fact in encoded:
            self.state = self.machine.apply(self.state, fact)
        self.journal += encoded
        return outcome

    def refusal(self, given: Input) -> StrataError:
        """What is said when it is refused; nothing is journaled then."""
        before = self.saved
        with pytest.raises(StrataError) as refused:
            self.ask(given)
        assert self.saved == before
        return refused.value

    @property
    def saved(self) -> bytes:
        return self.machine.save(self.state)

    @property
    def facts(self) -> list[facts.Fact]:
        return [facts.decode(fact) for fact in self.journal]

    def restart(self, *, from_snapshot: bool = True) -> None:
        if from_snapshot:
            self.state = self.machine.load(self.saved)
        else:
            self.state = self.machine.initial()
            for fact in self.journal:
                self.state = self.machine.apply(self.state, fact)

    # Clients

    def model(self, number: int = 0, *, tenant: str = TENANT, done: bool = True) -> str:
        session_id = f"session-{tenant}"
        self.ask(ClientCommand(tenant, OpenSession(session_id), self.now_s))
        model_id = f"{session_id}:train:{number}"
        self.ask(
            ClientCommand(tenant, SubmitOperation(ops.CreateModel(model_id, "tiny", LORA), session_id), self.now_s)
        )
        if done:
            self.run_all()
        return model_id

    def accept(self, *operations: ops.Operation, tenant: str = TENANT) -> list[str]:
        ids = []
        for operation in operations:
            reply = self.ask(ClientCommand(tenant, SubmitOperation(operation), self.now_s)).reply
            assert isinstance(reply, Accepted)
            ids.append(reply.future_id)
        return ids

    def finish_session(self, tenant: str = TENANT) -> Decision:
        return self.ask(ClientCommand(tenant, FinishSession(f"session-{tenant}", "done"), self.now_s))

    def abort(self, future_id: str, tenant: str = TENANT) -> Decision:
        return self.ask(ClientCommand(tenant, AbortOperation(future_id), self.now_s))

    def future(self, future_id: str, tenant: str = TENANT) -> OperationFuture:
        return find_future(self.state, tenant, future_id)

    def result(self, future_id: str, tenant: str = TENANT) -> ops.Result:
        result = self.future(future_id, tenant).result
        assert result is not None, f"{future_id} has not ended"
        return result

    # Ranks

    def dispatch(self) -> Dispatch | None:
        """The next one; what cannot be dispatched fails on the way."""
        while True:
            outcome = self.ask(DispatchNext(self.ranks, self.max_context, self.now_s))
            if isinstance(outcome.reply, Dispatching):
                return self.state.dispatches[outcome.reply.dispatch.number]
            if not outcome.facts:
                return None

    def answer(self, dispatch: Dispatch, results: Iterable[ops.Result] | None = None) -> Decision:
        if dispatch.snapshot:
            return self.ask(CompleteSnapshotCopy(dispatch.number, None))
        given = tuple(results) if results is not None else (ops.StepDone({}),) * len(dispatch.future_ids)
        return self.ask(CompleteDispatch(dispatch.number, given, self.now_s))

    def give_up(self, number: int, reason: str = "stuck") -> Decision:
        return self.ask(FailDispatch(number, reason, self.now_s))

    def run_all(self) -> list[str]:
        """Everything that can run, one after the other; the futures in the order they ran."""
        ran: list[str] = []
        while (dispatch := self.dispatch()) is not None:
            ran += dispatch.future_ids
            self.answer(dispatch)
        return ran
