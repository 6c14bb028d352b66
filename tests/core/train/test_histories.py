"""Random histories of clients, ranks, deaths and restarts: every operation ends once, in its order, none is lost."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from strata.base.errors import Code, StrataError
from strata.train.core import ops
from strata.train.core.client_commands import SubmitOperation
from strata.train.core.commands import RowOutOfMemory, SnapshotWritten
from strata.train.core.facts import Dispatched, DispatchFailed, OperationAccepted, OperationFinished
from strata.train.core.future import OPEN
from strata.train.core.inputs import ClientCommand, CommitSnapshot, RanksOutOfMemory
from strata.train.core.snapshots import KEEP
from tests.core.train.servers import Server, forward_backward, step

TENANTS = ("alice", "bob")


class Histories(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.server = Server(max_pending=12, snapshot_dispatches=2)
        self.models = {(tenant, n): self.server.model(n, tenant=tenant) for tenant in TENANTS for n in range(2)}
        self.sent: dict[str, ops.Sequenced] = {}
        self.applied: list[tuple[str, int]] = []
        """What the ranks did, in order. Survives restarts of the orchestrator."""
        self.applied_number = self.server.state.dispatched

    @rule(tenant=st.sampled_from(TENANTS), n=st.integers(0, 1), ahead=st.integers(0, 3), tokens=st.integers(1, 40))
    def submit(self, tenant: str, n: int, ahead: int, tokens: int) -> None:
        model = self.models[tenant, n]
        seq = self.server.state.models[model].line.wanted + ahead
        operation: ops.Sequenced = forward_backward(model, seq, [tokens] * 2) if tokens % 3 else step(model, seq)
        if tokens % 5 == 0:
            operation = ops.SaveWeights(model, seq, "weights", "best", overwrite=True)
        known = self.sent.get(f"{model}:{seq}")
        refused: Code | None = None
        try:
            self.server.ask(ClientCommand(tenant, SubmitOperation(operation), self.server.now_s))
        except StrataError as error:
            refused = error.code
        if refused is None:
            assert known in (None, operation)
            self.sent[f"{model}:{seq}"] = operation
        elif known is not None:
            assert refused is Code.CONFLICT
            assert known != operation
        else:
            assert refused is Code.EXHAUSTED

    @rule(data=st.data())
    @precondition(lambda self: self.sent)
    def submit_again(self, data: st.DataObject) -> None:
        future_id = data.draw(st.sampled_from(sorted(self.sent)))
        before = self.server.saved
        self.server.accept(self.sent[future_id], tenant=future_id.split(":")[0].removeprefix("session-"))
        assert self.server.saved == before

    @rule()
    def dispatch(self) -> None:
        self.server.dispatch()

    @rule(answered=st.booleans())
    def ranks_do_the_next(self, answered: bool) -> None:
        """Unanswered: the orchestrator died, or the link, before it heard of it. It asks again."""
        waiting = self.server.state.dispatches
        if not waiting:
            return
        dispatch = waiting[min(waiting)]
        if dispatch.number > self.applied_number:
            for future_id in dispatch.future_ids:
                model, _, seq = future_id.rpartition(":")
                self.applied.append((model, int(seq)))
            self.applied_number = dispatch.number
        if answered:
            self.server.answer(dispatch)

    @rule()
    @precondition(lambda self: self.server.state.dispatches)
    def ranks_are_stuck(self) -> None:
        """The group is thrown away; the new one is told all that was not given up."""
        number = min(self.server.state.dispatches)
        if number > self.applied_number:
            self.server.give_up(number)

    @rule()
    @precondition(lambda self: self.server.state.dispatches)
    def ranks_run_out_of_memory(self) -> None:
        """The group is thrown away; the new one is told what is left of the pass."""
        number = min(self.server.state.dispatches)
        operations = [self.server.state.futures.get(each) for each in self.server.state.dispatches[number].future_ids]
        passes = [each for each in operations if each is not None and isinstance(each.operation, ops.ForwardBackward)]
        if number > self.applied_number and passes:
            found = RowOutOfMemory(0, passes[0].model_id, 3, 2)
            self.server.ask(RanksOutOfMemory(number, found, self.server.now_s))

    @rule(trouble=st.sampled_from([None, None, "the disk is full"]))
    @precondition(lambda self: self.server.state.snapshotting is not None)
    def a_snapshot_is_written(self, trouble: str | None) -> None:
        taking = self.server.state.snapshotting
        assert taking is not None
        self.server.ask(
            CommitSnapshot(SnapshotWritten(1, taking.number, "digest", 1, 0.0, 0.0, trouble), self.server.now_s)
        )

    @rule(from_snapshot=st.booleans())
    def restart(self, from_snapshot: bool) -> None:
        before = self.server.saved
        self.server.restart(from_snapshot=from_snapshot)
        assert self.server.saved == before

    @invariant()
    def nothing_is_done_twice_and_each_model_in_its_order(self) -> None:
        assert len(self.applied) == len(set(self.applied))
        for model in self.models.values():
            done = [seq for each, seq in self.applied if each == model]
            assert done == sorted(done)

    @invariant()
    def every_dispatch_is_of_operations_that_came_and_ends_once(self) -> None:
        facts = self.server.facts
        ended = [fact.future_id for fact in facts if isinstance(fact, OperationFinished)]
        dispatched = [future_id for fact in facts if isinstance(fact, Dispatched) for future_id in fact.future_ids]
        given_up = [fact.number for fact in facts if isinstance(fact, DispatchFailed)]
        for each in (ended, dispatched, given_up):
            assert len(each) == len(set(each))

    @invariant()
    def whatever_comes_after_a_kept_snapshot_can_be_told_again_from_what_is_kept(self) -> None:
        facts, state = self.server.facts, self.server.state
        assert len(state.snapshots) <= KEEP
        for snapshot in state.snapshots:
            assert state.truncated_through <= snapshot.number <= state.settled_through
            taken = [isinstance(fact, Dispatched) and fact.number == snapshot.number for fact in facts].index(True)
            known = {
                *snapshot.pending,
                *(fact.future_id for fact in facts[taken:] if isinstance(fact, OperationAccepted)),
            }
            after = [fact for fact in facts[taken + 1 :] if isinstance(fact, Dispatched)]
            assert [fact.number for fact in after] == [*range(snapshot.number + 1, state.dispatched + 1)]
            assert known.issuperset(future_id for fact in after for future_id in fact.future_ids)

    @invariant()
    def every_checkpoint_is_the_last_of_its_name_that_was_saved(self) -> None:
        saved: dict[str, int] = {}
        for fact in self.server.facts:
            if isinstance(fact, OperationFinished) and not isinstance(fact.result, ops.Failed):
                operation = self.sent.get(fact.future_id)
                if isinstance(operation, ops.SaveWeights):
                    saved[operation.model_id] = operation.seq_id
        state = self.server.state
        assert {each.operation.model_id: each.operation.seq_id for each in state.checkpoints.values()} == saved
        at_work = {each.path for each in state.dispatches.values()}
        assert {each.path for each in state.saving.values()} <= at_work

    @invariant()
    def every_accepted_operation_has_a_future(self) -> None:
        for future_id in self.sent:
            assert self.server.state.futures.get(future_id) is not None

    def _let_work(self) -> None:
        server = self.server
        while server.state.dispatches:
            server.answer(server.state.dispatches[min(server.state.dispatches)])
        server.run_all()

    def teardown(self) -> None:
        """Fill the gaps and let the ranks work: everything ends."""
        server = self.server
        for model in self.models.values():
            line = server.state.models[model].line
            tenant = model.split(":")[0].removeprefix("session-")
            while line.held:
                # Those that wait come first: the queue may be full of them.
                self._let_work()
                server.accept(step(model, line.wanted), tenant=tenant)
                line = server.state.models[model].line
        self._let_work()
        assert not [each for each in server.state.futures if each.status in OPEN]
        self.whatever_comes_after_a_kept_snapshot_can_be_told_again_from_what_is_kept()


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
