"""Hostile losses: graphs that name code, go in circles, are deep or huge, or play tricks with shapes and zeros.

They are refused before anything is journaled, or bounded on the ranks, where the models of others stay as they are.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from time import process_time
from typing import Any, Final

import msgspec
import numpy as np
import pytest
import pytest_asyncio

from strata.train.core import model_options, ops
from strata.train.core.loss_graph import LossInput
from strata.train.runner.model.tiny import TinyModel, make
from strata.train.runner.passes import custom_loss
from tests.shell.train_api.test_protocol import Client, Server, served
from tests.shell.train_runner.driver import Driver, Layout, apart, batch, datum, logprobs_of, packed
from tests.shell.train_runner.single_rank import driver_of, one_rank
from tests.shell.train_runner.test_custom_loss import GROWING, SUM, built

pytestmark = pytest.mark.timeout(120)
AREA: Final = "training server: losses of clients"
Tries = Callable[[int], None]
Node = dict[str, Any]


def call(target: str, *args: Any, op: str = "call_function", name: str = "x", **kwargs: Any) -> Node:
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


REF: Final = {"ref": "logprobs"}
FIRST: Final = {"op": "placeholder", "name": "logprobs", "target": "logprobs", "args": [], "kwargs": {}}
OUTPUT: Final = {
    "op": "output",
    "name": "output",
    "target": "output",
    "args": [{"tuple": [{"ref": "x"}, {"dict": {}}]}],
    "kwargs": {},
}
GOOD: Final = call("sum", REF, op="call_method")


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


HOSTILE: Final[dict[str, list[Node]]] = {
    "a function of another module": [call("os.system", "id")],
    "eval": [call("builtins.eval", "1"), call("eval", "1")],
    "a loader of pickles": [call("torch.load", "x"), call("torch.hub.load", "x"), call("torch._C._jit_set", REF)],
    "a function under the table's prefix": [
        call("torch.nn.functional.__getattr__", "x"),
        call("operator.attrgetter", "x"),
    ],
    "an attribute that leads out": [
        call("getattr", REF, "__class__"),
        call("getattr", REF, "data"),
        call("getattr", REF, "grad_fn"),
    ],
    "a method that leaves torch": [
        call(each, REF, op="call_method")
        for each in (
            "numpy",
            "tolist",
            "item",
            "backward",
            "set_",
            "register_hook",
            "__reduce_ex__",
            "apply_",
            "share_memory_",
        )
    ],
    "a method in place": [call(each, REF, op="call_method") for each in ("add_", "zero_", "resize_", "copy_")],
    "an index that may miss": [
        call("torch.gather", REF, 0, REF),
        call("torch.index_select", REF, 0, REF),
        call("torch.take", REF, REF),
    ],
    "chance": [
        call("torch.rand_like", REF),
        call("torch.dropout", REF, 0.5, True),
        call("bernoulli", REF, op="call_method"),
    ],
    "memory without numbers": [
        call("torch.zeros", 1 << 40),
        call("torch.empty", 1 << 40),
        call("torch.arange", 1 << 40),
        call("repeat", REF, 1 << 40, op="call_method"),
        call("torch.einsum", "i,j->ij", REF, REF),
    ],
    "a result into a given place": [call("torch.exp", REF, out=REF)],
    "a module and a captured tensor": [call("linear", REF, op="call_module"), call("weight", op="get_attr")],
    "a node that is not there": [
        call("torch.exp", {"ref": "later"}),
        call("torch.exp", {"ref": "x"}),
        call("torch.exp", {"ref": ["x"]}),
    ],
    "a name of its own that is taken": [call("torch.exp", REF, name="logprobs")],
    "a name that is none": [
        call("torch.exp", REF, name="x y"),
        call("torch.exp", REF, name=""),
        call("torch.exp", REF, name="é" * 200),
    ],
    "an argument of two forms": [
        call("torch.exp", {"ref": "logprobs", "float": "inf"}),
        call("torch.exp", {"code": "1"}),
        call("torch.exp", {"device": "cuda"}),
    ],
    "a text where a number is": [call("torch.sum", "dim"), call("to", REF, "cuda", op="call_method")],
    "a number of more than 64 bits": [call("torch.mul", REF, 1 << 200)],
    "a type that is none": [call("to", REF, {"dtype": "quint8"}, op="call_method")],
    "arguments in many layers": [call("torch.stack", nested(50))],
    "very many arguments": [call("torch.stack", [REF] * 1000)],
    "a slice that is none": [call("operator.getitem", REF, {"slice": [1] * 10})],
    "a dictionary": [call("torch.exp", {"dict": {"k" * 100_000: 1}}), call("torch.stack", [REF, {"dict": {}}])],
    "a long text": [call("getattr", "t" * 100_000, "shape"), call("getattr", REF, ["t" * 100_000])],
}


def body(session: str, nodes: list[Node], **changes: Any) -> dict[str, Any]:
    made = {
        "session_id": session,
        "custom_loss_seq_id": 0,
        "name": "loss",
        "inputs": [{"name": "logprobs", "rank": 1}],
        "graph": {"format": 1, "nodes": nodes},
        "type": "create_custom_loss",
    }
    return made | changes


SMALL: Final = len(
    msgspec.msgpack.encode(
        {
            "name": "loss",
            "inputs": [{"name": "logprobs", "rank": 1}],
            "graph": {"format": 1, "nodes": [FIRST, GOOD, OUTPUT]},
        }
    )
)
"""Bytes of the smallest loss."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    async with served(tmp_path_factory.mktemp("t"), limits=f"max_loss_bytes_per_tenant = {40 * SMALL // 3}") as found:
        await found.alice.open()
        await found.bob.open()
        yield found


def session_of(client: Client) -> str:
    return client.model.partition(":")[0]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", HOSTILE, ids=lambda name: name.replace(" ", "-"))
@pytest.mark.attack(AREA, "a node that is more than arithmetic")
async def test_a_hostile_node_is_refused_and_nothing_is_journaled(server: Server, name: str, tries: Tries) -> None:
    bob = server.bob
    for node in HOSTILE[name]:
        reply = await bob.send("POST", "/api/v1/create_custom_loss", json=body(session_of(bob), [FIRST, node, OUTPUT]))
        assert reply.status_code == 400, (node, reply.text)
        assert len(reply.text) < 1000
        tries(1)
    # Nothing was stored: the number is free.
    made = await bob.post("create_custom_loss", body(session_of(bob), [FIRST, GOOD, OUTPUT], custom_loss_seq_id=0))
    assert (await bob.done(made))["loss_id"] == f"{session_of(bob)}:loss:0"


GRAPHS: Final[dict[str, Callable[[], dict[str, Any]]]] = {
    "no nodes": lambda: body("S", []),
    "no output": lambda: body("S", [FIRST, GOOD]),
    "a placeholder with arguments": lambda: body("S", [FIRST | {"kwargs": {"k" * 100_000: 1}}, GOOD, OUTPUT]),
    "a placeholder with a default": lambda: body("S", [FIRST | {"args": [1]}, GOOD, OUTPUT]),
    "an output with a long target": lambda: body("S", [FIRST, GOOD, OUTPUT | {"target": "t" * 100_000}]),
    "two outputs": lambda: body("S", [FIRST, GOOD, OUTPUT, OUTPUT | {"name": "o"}]),
    "an output that is none": lambda: body("S", [FIRST, GOOD, OUTPUT | {"args": [{"ref": "x"}]}]),
    "a metric under a name of the server's": lambda: body(
        "S", [FIRST, GOOD, OUTPUT | {"args": [{"tuple": [{"ref": "x"}, {"dict": {"loss:sum": {"ref": "x"}}}]}]}]
    ),
    "very many metrics": lambda: body(
        "S",
        [
            FIRST,
            GOOD,
            OUTPUT
            | {"args": [{"tuple": [{"ref": "x"}, {"dict": {f"custom/{n}:sum": {"ref": "x"} for n in range(50)}}]}]},
        ],
    ),
    "no logprobs": lambda: body("S", [GOOD, OUTPUT], inputs=[]),
    "an input that no placeholder takes": lambda: body(
        "S", [FIRST, GOOD, OUTPUT], inputs=[{"name": "logprobs", "rank": 1}, {"name": "more", "rank": 1}]
    ),
    "a rank that is none": lambda: body("S", [FIRST, GOOD, OUTPUT], inputs=[{"name": "logprobs", "rank": 9}]),
    "a later format": lambda: body("S", [], graph={"format": 2, "nodes": [FIRST, GOOD, OUTPUT]}),
    "a field more": lambda: body("S", [FIRST | {"code": "x"}, GOOD, OUTPUT]),
    "a thousand nodes": lambda: body(
        "S", [FIRST, *(call("torch.exp", REF, name=f"n{place}") for place in range(1000)), GOOD, OUTPUT]
    ),
    "a megabyte": lambda: body("S", [FIRST, GOOD | {"args": [REF, *([1] * 400_000)]}, OUTPUT]),
    "lists in lists without end": lambda: body("S", [FIRST, GOOD | {"args": [nested(900)]}, OUTPUT]),
}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", GRAPHS, ids=lambda name: name.replace(" ", "-"))
@pytest.mark.attack(AREA, "a graph that is none, or too large")
async def test_a_graph_that_is_none_is_refused(server: Server, name: str) -> None:
    bob = server.bob
    given = GRAPHS[name]() | {"session_id": session_of(bob), "custom_loss_seq_id": 7}
    reply = await bob.send("POST", "/api/v1/create_custom_loss", json=given)
    assert reply.status_code in (400, 413), reply.text[:300]
    assert len(reply.text) < 1000


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.attack(AREA, "losses without end")
async def test_the_losses_of_a_tenant_have_a_limit_of_their_own(server: Server) -> None:
    alice, bob = server.alice, server.bob
    statuses = []
    for number in range(20):
        given = body(session_of(alice), [FIRST, GOOD, OUTPUT], custom_loss_seq_id=number)
        statuses.append((await alice.send("POST", "/api/v1/create_custom_loss", json=given)).status_code)
    assert statuses == [200] * 13 + [422] * 7, "of thirteen and a third"
    await bob.post("create_custom_loss", body(session_of(bob), [FIRST, GOOD, OUTPUT], custom_loss_seq_id=1))
    # As few nodes with as many arguments as they may have count for more.
    long = call("torch.stack", [REF] * 60)
    statuses = []
    for number in range(2, 12):
        given = body(session_of(bob), [FIRST, long, OUTPUT], custom_loss_seq_id=number)
        statuses.append((await bob.send("POST", "/api/v1/create_custom_loss", json=given)).status_code)
    assert 0 < statuses.count(200) < 5
    again = body(session_of(alice), [FIRST, GOOD, OUTPUT])
    await alice.post("create_custom_loss", again)
    other = copy.deepcopy(again)
    other["graph"]["nodes"][1]["target"] = "mean"
    await alice.post("create_custom_loss", other, 422)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.attack(AREA, "the loss of another tenant, or of another session")
async def test_the_loss_of_another_is_as_if_it_had_never_been(server: Server, tries: Tries) -> None:
    alice, bob = server.alice, server.bob
    own = body(session_of(alice), [FIRST, GOOD, OUTPUT])
    loss = (await alice.done(await alice.post("create_custom_loss", own)))["loss_id"]
    await bob.post("create_custom_loss", own, 404)
    await bob.post("retrieve_future", {"request_id": loss}, 404)
    heard = []
    for number, loss_id in enumerate((loss, f"{session_of(bob)}:loss:99", f"{session_of(alice)}:loss:99"), 1):
        batch_ = bob.batch(number)
        batch_["forward_backward_input"] |= {"loss_fn": "custom", "loss_fn_config": {"loss_id": loss_id}}
        done = await bob.done(await bob.post("forward_backward", batch_))
        assert done["category"] == "user"
        heard.append(done["error"].replace(loss_id, "ID"))
        tries(1)
    assert heard[0] == heard[2]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.attack(AREA, "a group that is none")
async def test_a_group_that_is_none_fails_in_its_turn(server: Server, tries: Tries) -> None:
    eve = server.alice
    loss = (await eve.done(await eve.post("create_custom_loss", body(session_of(eve), [FIRST, GOOD, OUTPUT]))))[
        "loss_id"
    ]
    for number, size in enumerate((0, -1, 2, 1e9, 1.5, "two"), 1):
        batch_ = eve.batch(number)
        batch_["forward_backward_input"] |= {
            "loss_fn": "custom",
            "loss_fn_config": {"loss_id": loss, "group_size": size},
        }
        done = await eve.done(await eve.post("forward_backward", batch_))
        assert done["category"] == "user", done
        tries(1)
    for number, size in enumerate((0, 0.5, -1, 2, 1e9), 7):
        batch_ = eve.batch(number)
        batch_["forward_backward_input"] |= {"loss_fn": "cross_entropy", "loss_fn_config": {"group_size": size}}
        done = await eve.done(await eve.post("forward_backward", batch_))
        assert "has no groups" in done["error"], done
        tries(1)
    assert "error" not in await eve.done(await eve.post("forward_backward", eve.batch(12)))


# On a rank


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    folder = tmp_path_factory.mktemp("graphs")
    make(folder / "llama", TinyModel())
    with one_rank(folder) as group:
        driver = driver_of(group, folder / "llama", folder / "files")
        for name in ("victim", "attacker"):
            driver.create(name, model_options.LoraConfig(rank=4, seed=1))
        driver.train("victim", batch(seed=3))
        driver.step("victim", learning_rate=0.02)
        yield driver


def bits(driver: Driver) -> list[bytes]:
    return [each.tobytes() for each in logprobs_of(driver.train("victim", batch(seed=4), forward_only=True))]


@pytest.mark.parametrize("name", GROWING, ids=lambda name: name.replace(" ", "-"))
@pytest.mark.attack(AREA, "a graph that grows with the shapes of a batch")
def test_a_graph_that_grows_fails_its_own_operation_soon(ranks: Driver, name: str) -> None:
    before = bits(ranks)
    started = process_time()
    (failed,) = ranks.passes(
        ("attacker", [datum(1, 200)]), loss=model_options.LossName.CUSTOM, custom=built(*growing(name), SUM)
    )
    assert process_time() - started < 5
    assert isinstance(failed, ops.Failed)
    assert failed.category == "user"
    assert bits(ranks) == before
    assert ranks.step("attacker", learning_rate=0.0)["grad_norm"] == 0.0


def growing(name: str) -> Any:
    """A short datum may have a table of its pairs, so that one is made of tables of tables."""
    if name != "a table of all pairs":
        return GROWING[name]
    column = {"tuple": [{"slice": [None, None, None]}, {"slice": [None, None, None]}, None]}
    return [
        *GROWING[name][:1],
        ("call_function", "table", "operator.mul", [{"ref": "column"}, REF]),
        ("call_function", "deeper", "operator.getitem", [{"ref": "table"}, column]),
        ("call_function", "last", "operator.mul", [{"ref": "deeper"}, REF]),
    ]


@pytest.mark.attack(AREA, "many groups of one token that each compute much")
def test_the_groups_of_an_operation_share_what_a_short_one_may_cost(ranks: Driver) -> None:
    custom = built(("call_method", "last", "expand", [REF, 100_000, -1]), SUM)
    datums = [datum(seed, 1) for seed in range(60)]
    (alone,) = ranks.passes(
        ("attacker", datums[:1]), loss=model_options.LossName.CUSTOM, custom=custom, forward_only=True
    )
    assert isinstance(alone, ops.PassDone)
    (failed,) = ranks.passes(("attacker", datums), loss=model_options.LossName.CUSTOM, custom=custom, forward_only=True)
    assert isinstance(failed, ops.Failed)
    assert "more than 512 numbers" in failed.message


@pytest.mark.parametrize("layout", [packed, apart], ids=["in one row", "in several rows"])
@pytest.mark.attack(AREA, "a loss that needs more memory than there is")
def test_a_loss_that_runs_out_of_memory_ends_the_rank_and_is_reported_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: Layout
) -> None:
    """Not an error of the client: in a replay on ranks that have the memory, the pass would succeed."""
    monkeypatch.setattr(custom_loss, "COST_FACTOR", 1 << 60)
    monkeypatch.setattr(custom_loss, "MAX_BYTES", 1 << 60)
    make(tmp_path / "llama", TinyModel())
    custom = built(
        ("call_method", "large", "expand", [REF, 1 << 46, -1]), ("call_method", "last", "neg", [{"ref": "large"}]), SUM
    )
    with one_rank(tmp_path) as group:
        driver = driver_of(group, tmp_path / "llama", tmp_path / "files")
        driver.create("large", model_options.LoraConfig(rank=4, seed=1))
        with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
            driver.passes(
                ("large", [datum(1, 4), datum(2, 4)]),
                loss=model_options.LossName.CUSTOM,
                config={"group_size": 2},
                custom=custom,
                layout=layout,
            )
        exhausted = driver_of(group, tmp_path / "llama", tmp_path / "files").attach().exhausted
    assert exhausted is not None
    assert (exhausted.model_id, exhausted.tokens, exhausted.sure) == ("large", 8, True)


@pytest.mark.attack(AREA, "zeros and infinities in a loss")
def test_a_loss_that_is_not_finite_trains_nothing(ranks: Driver, tries: Tries) -> None:
    before = bits(ranks)
    zero = ("call_function", "zero", "operator.mul", [{"ref": "logprobs"}, 0.0])
    for target in ("reciprocal", "log", "rsqrt", "sqrt"):
        custom = built(zero, ("call_method", "last", target, [{"ref": "zero"}]), SUM)
        (failed,) = ranks.passes(("attacker", [datum(1, 9)]), loss=model_options.LossName.CUSTOM, custom=custom)
        assert isinstance(failed, ops.Failed), target
        assert ranks.step("attacker", learning_rate=0.0)["grad_norm"] == 0.0
        tries(1)
    assert bits(ranks) == before


@pytest.mark.attack(AREA, "inputs of other shapes than declared")
def test_an_input_of_another_shape_is_refused_by_its_name(ranks: Driver, tries: Tries) -> None:
    inputs = [LossInput("logprobs", 1), LossInput("more", 1)]
    node = ("call_function", "last", "operator.mul", [{"ref": "logprobs"}, {"ref": "more"}])
    for shape in ((), (1,), (8,), (9, 1), (1, 9), (3, 3)):
        one = datum(1, 9, more=np.ones(shape))
        (failed,) = ranks.passes(
            ("attacker", [one]), loss=model_options.LossName.CUSTOM, custom=built(node, SUM, inputs=inputs)
        )
        assert isinstance(failed, ops.Failed), shape
        assert "more has the shape" in failed.message
        tries(1)
    (missing,) = ranks.passes(
        ("attacker", [datum(1, 9)]), loss=model_options.LossName.CUSTOM, custom=built(node, SUM, inputs=inputs)
    )
    assert isinstance(missing, ops.Failed)
    assert "more is missing" in missing.message
