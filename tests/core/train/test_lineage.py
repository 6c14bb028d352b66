"""What a checkpoint was trained with: counted from results, kept over restarts, and handed on to what loads it."""

from __future__ import annotations

import pytest

from strata.train.core import ops
from strata.train.core.client_commands import ImportCheckpoint
from strata.train.core.inputs import ClientCommand
from strata.train.core.lineage import IMPORTED_FROM
from strata.train.core.state import TrainedCount, WeightsLineage
from tests.core.train.servers import LORA, TENANT, Server, forward_backward, step

PASS = ops.PassDone(ops.InlinePayload(b"x"))
STEP = ops.StepDone({})


def run(server: Server, *work: tuple[ops.Operation, ops.Result]) -> None:
    for operation, result in work:
        server.accept(operation)
        dispatch = server.dispatch()
        assert dispatch is not None
        server.answer(dispatch, [result])


def save(model: str, seq: int, name: str) -> tuple[ops.Operation, ops.Result]:
    operation = ops.SaveWeights(model, seq, "weights", name)
    return operation, ops.WeightsSaved(f"tinker://{model}/weights/{name}")


def lineage(server: Server, model: str, name: str) -> WeightsLineage:
    known = server.state.checkpoints[model, "weights", name].lineage
    assert known is not None
    return known


def test_a_checkpoint_counts_what_steps_have_used_and_nothing_else() -> None:
    server = Server()
    model = server.model()
    run(
        server,
        (forward_backward(model, 1, (3, 5), sampled_tokens=4), PASS),
        (forward_backward(model, 2, (7,), forward_only=True), PASS),
        (forward_backward(model, 3, (2,)), PASS),
        (step(model, 4), STEP),
        (forward_backward(model, 5, (9,)), PASS),
        save(model, 6, "one"),
        (ops.AbortGradients(model, 7), ops.GradientsAborted()),
        (forward_backward(model, 8, (1,)), ops.Failed("user", "no")),
        (step(model, 9), STEP),
        save(model, 10, "two"),
    )
    trained = TrainedCount(steps=1, passes=2, datums=3, tokens=10, sampled_tokens=4)
    one = lineage(server, model, "one")
    assert (one.parent, one.trained, one.before) == ("", trained, TrainedCount())
    assert lineage(server, model, "two").trained == trained.plus(TrainedCount(steps=1))


@pytest.mark.parametrize("from_snapshot", [True, False])
def test_what_loads_a_checkpoint_has_it_as_its_parent_and_goes_on_from_its_count(*, from_snapshot: bool) -> None:
    server = Server()
    model, other = server.model(), server.model(1)
    run(server, (forward_backward(model, 1), PASS), (step(model, 2), STEP), save(model, 3, "first"))
    run(server, (forward_backward(other, 1, (8,)), PASS))
    path = f"tinker://{model}/weights/first"
    load = ops.LoadWeights(other, 2, model, "weights", "first", optimizer=True)
    run(server, (load, ops.WeightsLoaded(path)))
    server.restart(from_snapshot=from_snapshot)
    run(server, (forward_backward(other, 3, (2, 2)), PASS), (step(other, 4), STEP), save(other, 5, "second"))
    second = lineage(server, other, "second")
    assert second.parent == path
    assert second.trained == TrainedCount(1, 1, 2, 4), "gradients from before the load are gone"
    assert second.before == TrainedCount(1, 1, 1, 3)
    load = ops.LoadWeights(model, 4, other, "weights", "second", optimizer=False)
    run(server, (load, ops.WeightsLoaded("")), save(model, 5, "third"))
    assert lineage(server, model, "third").before == TrainedCount(2, 2, 3, 7)


def test_imported_weights_say_that_they_were_trained_elsewhere() -> None:
    server = Server()
    command = ImportCheckpoint("i", "theirs", "import-1", "tiny", LORA)
    server.ask(ClientCommand(TENANT, command, server.now_s))
    assert lineage(server, "import-1", "theirs") == WeightsLineage(IMPORTED_FROM)
