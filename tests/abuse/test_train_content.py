"""What a tenant may send to the training server: hostile batches, names and adapters. The ranks live on, and the models
of others stay as they are, bit by bit."""

from __future__ import annotations

import gzip
import io
import json
import math
import struct
import tarfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import pytest_asyncio
from safetensors.numpy import save

from strata.train.core import model_options, ops
from strata.train.core.commands import Segment
from strata.train.peft.layers import ADAPTER, ADAPTER_CONFIG
from strata.train.runner.model.tiny import TinyModel, make
from strata.train.wire import tinker
from tests.shell.train_api.test_protocol import BASE, Server, served
from tests.shell.train_runner.driver import Driver, batch, datum, dense, logprobs_of
from tests.shell.train_runner.single_rank import driver_of, one_rank

pytestmark = pytest.mark.timeout(120)
AREA: Final = "training server: content"
Tries = Callable[[int], None]
F32, I64 = ops.DType.F32, ops.DType.I64
HUGE: Final = 2**62


# Batches, on a rank


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """With a model `victim` that is trained a little, and an empty one."""
    folder = tmp_path_factory.mktemp("content")
    make(folder / "llama", TinyModel())
    with one_rank(folder) as group:
        driver = driver_of(group, folder / "llama", folder / "files")
        driver.create("victim", model_options.LoraConfig(rank=4, seed=1))
        driver.create("attacker", model_options.LoraConfig(rank=4, seed=2))
        driver.train("victim", batch(seed=3))
        driver.step("victim", learning_rate=0.02)
        yield driver


def bits(driver: Driver) -> list[bytes]:
    """What the victim's model says, to the last bit."""
    return [each.tobytes() for each in logprobs_of(driver.train("victim", batch(seed=4), forward_only=True))]


def sparse(crow: list[int], col: list[int], shape: tuple[int, int] = (4, 3)) -> ops.Sparse:
    data = np.ones(len(col), "<f4").tobytes()
    return ops.Sparse(F32, shape, data, np.asarray(crow, "<i8").tobytes(), np.asarray(col, "<i8").tobytes())


def with_tokens(*tokens: int) -> ops.Datum:
    return ops.Datum(np.asarray(tokens, "<i4").tobytes(), datum(1, len(tokens)).inputs)


BATCHES: Final[Mapping[str, Callable[[], ops.Datum]]] = {
    "a token beyond the vocabulary": lambda: with_tokens(1, 512, 2, 3),
    "the largest token": lambda: with_tokens(1, 2**31 - 1, 2, 3),
    "a negative token": lambda: with_tokens(1, -1, 2, 3),
    "a target beyond the vocabulary": lambda: datum(1, 4, target_tokens=dense([1, 2, 512, 3], I64)),
    "a target of 2^62": lambda: datum(1, 4, target_tokens=dense([1, 2, HUGE, 3], I64)),
    "a negative target": lambda: datum(1, 4, target_tokens=dense([1, -5, 2, 3], I64)),
    "fewer targets than tokens": lambda: datum(1, 4, target_tokens=dense([1, 2, 3], I64)),
    "targets of eight dimensions": lambda: datum(1, 4, target_tokens=dense(np.zeros((4, 1, 1, 1, 1, 1, 1, 1)), I64)),
    "a shape whose product overflows": lambda: datum(1, 4, weights=ops.Dense(F32, (2**32, 2**32), b"\0" * 16)),
    "a negative shape": lambda: datum(1, 4, weights=ops.Dense(F32, (-4,), b"\0" * 16)),
    "a shape that is not that of the data": lambda: datum(1, 4, weights=ops.Dense(F32, (4,), b"\0" * 8)),
    "sparse rows beyond the data": lambda: datum(1, 4, weights=sparse([0, 9, 9, 9, 9], [0])),
    "sparse rows that go back": lambda: datum(1, 4, weights=sparse([0, 2, 1, 2, 2], [0, 1])),
    "a sparse column beyond the shape": lambda: datum(1, 4, weights=sparse([0, 1, 1, 1, 1], [HUGE])),
    "a negative sparse column": lambda: datum(1, 4, weights=sparse([0, 1, 1, 1, 1], [-1])),
    "an input that no loss has": lambda: datum(1, 4, __class__=[1.0] * 4),
    "weights that are no numbers": lambda: datum(1, 4, weights=[math.nan] * 4),
    "infinite weights": lambda: datum(1, 4, weights=[math.inf, 0.0, 0.0, 0.0]),
    "weights whose sum overflows": lambda: datum(1, 4, weights=[3e38] * 4),
    "no token at all": lambda: ops.Datum(b"", {}),
}


@pytest.mark.parametrize("case", BATCHES)
@pytest.mark.attack(AREA, "a batch that lies about its tokens, shapes or weights")
def test_a_hostile_batch_is_refused_or_finite_and_harms_nobody(ranks: Driver, case: str) -> None:
    before = bits(ranks)
    (result,) = ranks.passes(("attacker", [BATCHES[case]()]))
    if isinstance(result, ops.PassDone):
        assert isinstance(result.payload, ops.InlinePayload)
        assert math.isfinite(ops.decode_pass_result(result.payload.data).metrics["loss:sum"])
    else:
        assert isinstance(result, ops.Failed)
        assert result.category == "user", result
    assert bits(ranks) == before


LOSSES: Final[Mapping[str, tuple[model_options.LossName, Mapping[str, Any], Mapping[str, float]]]] = {
    "log probabilities of +1e38": (model_options.LossName.PPO, {"logprobs": [1e38] * 4, "advantages": [1.0] * 4}, {}),
    "log probabilities of -1e38": (model_options.LossName.PPO, {"logprobs": [-1e38] * 4, "advantages": [1.0] * 4}, {}),
    "advantages of 1e38": (model_options.LossName.PPO, {"logprobs": [-1.0] * 4, "advantages": [1e38] * 4}, {}),
    "a beta of 1e300": (model_options.LossName.DRO, {"logprobs": [-1.0] * 4, "advantages": [1.0] * 4}, {"beta": 1e300}),
    "a config that no loss has": (model_options.LossName.CROSS_ENTROPY, {}, {"__import__": 1.0}),
    "a config that is no number": (
        model_options.LossName.PPO,
        {"logprobs": [-1.0] * 4},
        {"clip_low_threshold": math.nan},
    ),
}


@pytest.mark.parametrize("case", LOSSES)
@pytest.mark.attack(AREA, "inputs of a loss that overflow")
def test_a_hostile_loss_is_refused_or_finite_and_harms_nobody(ranks: Driver, case: str) -> None:
    loss, inputs, config = LOSSES[case]
    before = bits(ranks)
    given = datum(1, 4, **inputs)
    kept = {name: value for name, value in given.inputs.items() if name != "weights" or loss == "cross_entropy"}
    (result,) = ranks.passes(("attacker", [ops.Datum(given.tokens, kept)]), loss=loss, config=config)
    if isinstance(result, ops.PassDone):
        assert isinstance(result.payload, ops.InlinePayload)
        assert math.isfinite(ops.decode_pass_result(result.payload.data).metrics["loss:sum"])
    assert bits(ranks) == before


@pytest.mark.attack(AREA, "an adapter that exploded, in one pass with another tenant")
def test_an_exploded_adapter_does_not_reach_its_neighbours(ranks: Driver, tries: Tries) -> None:
    alone = bits(ranks)
    for rate in (1e30, 3e38):
        ranks.create("exploded", model_options.LoraConfig(rank=4, seed=9, alpha=1e6))
        ranks.train("exploded", batch(seed=5))
        ranks.step("exploded", learning_rate=rate, eps=0.0)
        for forward_only in (True, False):
            results = ranks.passes(
                ("exploded", batch(seed=6)),
                ("victim", batch(seed=4)),
                forward_only=forward_only,
                layout=lambda items, count: [[[*_row(items, 0)], [*_row(items, 1)]] for _ in range(count)],
            )
            assert isinstance(results[1], ops.PassDone)
            assert isinstance(results[1].payload, ops.InlinePayload)
            said = logprobs_of(ops.decode_pass_result(results[1].payload.data))
            assert [each.tobytes() for each in said] == alone
            tries(1)
        ranks.unload("exploded")
    assert bits(ranks) == alone


def _row(items: Any, item: int) -> Iterator[Segment]:
    return (Segment(item, number) for number in range(len(items[item])))


# Names, JSON and adapters, over HTTP


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    async with served(tmp_path_factory.mktemp("t")) as found:
        await found.alice.open()
        found.alice.seq = 0  # type: ignore[attr-defined]
        yield found


def next_seq(server: Server) -> int:
    server.alice.seq += 1  # type: ignore[attr-defined]
    return int(server.alice.seq)  # type: ignore[attr-defined]


on_server = pytest.mark.asyncio(loop_scope="module")
NAMES: Final = (
    "..",
    ".",
    "/etc/x",
    "../../x",
    "a/b",
    "a\\b",
    "a@1",
    "-x",
    ".hidden",
    "x" * 200,
    "a b",
    "é",
    "a\u202eb",
)
PATHS: Final = ("file:///etc/passwd", "s3://bucket/x", "tinker://..", "tinker://../../weights/x", "/etc/passwd", "~/x",
                "tinker://a/b/c/d", "tinker:///weights/x", "http://127.0.0.1/x")  # fmt: skip


@on_server
@pytest.mark.attack(AREA, "names of checkpoints that are paths")
async def test_a_name_that_is_no_name_is_refused(server: Server, tries: Tries) -> None:
    alice = server.alice
    for name in NAMES:
        body = {"model_id": alice.model, "seq_id": next_seq(server), "path": name}
        done = await alice.done(await alice.post("save_weights", body))
        assert done["category"] == "user", name
        tries(1)
    reply = await alice.send(
        "POST", "/api/v1/save_weights", json={"model_id": alice.model, "seq_id": next_seq(server), "path": "a\0b"}
    )
    assert reply.status_code == 400 or (await alice.done(reply.json()))["category"] == "user"


@on_server
@pytest.mark.attack(AREA, "paths of weights that are elsewhere")
async def test_weights_are_loaded_from_checkpoints_alone(server: Server, tries: Tries) -> None:
    alice = server.alice
    for path in PATHS:
        body = {"model_id": alice.model, "seq_id": next_seq(server), "path": path, "optimizer": True}
        done = await alice.done(await alice.post("load_weights", body))
        assert done["category"] == "user", path
        tries(1)


@on_server
@pytest.mark.parametrize("loss", ["__import__", "os.system", "../x", "", "x" * 5000, "cross_entropy\0"])
@pytest.mark.attack(AREA, "a loss that is the name of something else")
async def test_a_loss_that_is_unknown_is_refused(server: Server, loss: str) -> None:
    alice = server.alice
    body = alice.batch(next_seq(server))
    body["forward_backward_input"]["loss_fn"] = loss
    reply = await alice.send("POST", "/api/v1/forward_backward", json=body)
    assert reply.status_code == 400 or (await alice.done(reply.json()))["category"] == "user"


ADAM: Final = ({"learning_rate": 1e31}, {"learning_rate": -1.0}, {"beta1": 1.0}, {"beta2": -0.1}, {"eps": -1.0},
               {"weight_decay": 1e300}, {"grad_clip_norm": -1}, {"learning_rate": "1"}, {"nesterov": True})  # fmt: skip


@on_server
@pytest.mark.attack(AREA, "numbers of an optimizer beyond what can be")
async def test_numbers_of_an_optimizer_have_their_range(server: Server, tries: Tries) -> None:
    alice = server.alice
    for params in ADAM:
        body = {"model_id": alice.model, "seq_id": next_seq(server), "adam_params": params}
        done = await alice.done(await alice.post("optim_step", body))
        assert done["category"] == "user", params
        tries(1)


@on_server
@pytest.mark.attack(AREA, "schedules and adapters beyond what can be")
async def test_a_model_is_created_with_numbers_in_their_range(server: Server, tries: Tries) -> None:
    session = server.alice.model.partition(":")[0]
    base: dict[str, Any] = {"session_id": session, "model_seq_id": 9, "base_model": BASE}
    for more in (
        {"lora_config": {"rank": 0}},
        {"lora_config": {"rank": 10**9}},
        {"lora_config": {"rank": 4, "alpha": 1e7}},
        {"lora_config": {"rank": 4, "alpha": -1}},
        {"lora_config": {"rank": 4, "seed": 2**63}},
        {"lora_config": {"rank": 4}, "schedule": {"total_steps": 2**63}},
        {"lora_config": {"rank": 4}, "base_model": "../../etc"},
        {"lora_config": {"rank": 4}, "optimizer_config": {"type": "__import__"}},
    ):
        reply = await server.alice.send("POST", "/api/v1/create_model", json=base | more)
        assert reply.status_code == 400, more
        tries(1)


@on_server
@pytest.mark.attack(AREA, "200,000 deep JSON in a pass, and random protobuf")
async def test_a_batch_that_cannot_be_read_is_refused_in_words(server: Server, tries: Tries) -> None:
    deep = b'{"forward_backward_input":' + b"[" * 200_000
    chance = np.random.default_rng(1)
    for content, kind in (
        (deep, "application/json"),
        *((chance.bytes(size), tinker.MEDIA_TYPE) for size in (1, 10, 1000, 100_000)),
    ):
        reply = await server.alice.send(
            "POST", "/api/v1/forward_backward", content=content, headers={"Content-Type": kind}
        )
        assert 400 <= reply.status_code < 500, reply.text
        tries(1)


def adapter_tar(change: Callable[[tarfile.TarFile, dict[str, bytes]], None] | None = None) -> bytes:
    """A good archive, or one that is changed."""
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    weights = save({f"{name}A.weight": np.ones((4, 64), np.float32), f"{name}B.weight": np.ones((64, 4), np.float32)})
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": BASE, "bias": "none"}
    files = {ADAPTER: weights, ADAPTER_CONFIG: json.dumps(config).encode()}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        if change is not None:
            change(archive, files)
        for file, content in files.items():
            add(archive, file, content)
    return packed.getvalue()


def add(
    archive: tarfile.TarFile, name: str, content: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = ""
) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.type, member.linkname = len(content), kind, link
    archive.addfile(member, io.BytesIO(content))


def configured(**more: Any) -> Callable[[tarfile.TarFile, dict[str, bytes]], None]:
    def change(_: tarfile.TarFile, files: dict[str, bytes]) -> None:
        files[ADAPTER_CONFIG] = json.dumps(json.loads(files[ADAPTER_CONFIG]) | more).encode()

    return change


def weighted(content: bytes) -> Callable[[tarfile.TarFile, dict[str, bytes]], None]:
    return lambda _, files: files.update({ADAPTER: content})


def header(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def many(archive: tarfile.TarFile, _: dict[str, bytes]) -> None:
    for number in range(17):
        add(archive, f"file-{number}", b"x")


Q: Final = b"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
ARCHIVES: Final[Mapping[str, Callable[[tarfile.TarFile, dict[str, bytes]], None]]] = {
    "a path out of the folder": lambda archive, _: add(archive, "../../evil", b"x"),
    "an absolute path": lambda archive, _: add(archive, "/etc/evil", b"x"),
    "a symbolic link": lambda archive, _: add(archive, "link", kind=tarfile.SYMTYPE, link="/etc/passwd"),
    "a hard link": lambda archive, _: add(archive, "hard", kind=tarfile.LNKTYPE, link="/etc/passwd"),
    "a link by the name of the weights": lambda archive, _: add(
        archive, ADAPTER, kind=tarfile.SYMTYPE, link="/etc/passwd"
    ),
    "a device": lambda archive, _: add(archive, "zero", kind=tarfile.CHRTYPE),
    "a pipe": lambda archive, _: add(archive, "pipe", kind=tarfile.FIFOTYPE),
    "the same file twice": lambda archive, files: add(archive, ADAPTER_CONFIG, files[ADAPTER_CONFIG]),
    "seventeen members": many,
    "pickled weights": lambda archive, _: add(archive, "adapter_model.bin", b"\x80\x04."),
    "a header that is longer than the file": weighted(struct.pack("<Q", 2**63) + b"{}"),
    "a header that is no JSON": weighted(header(b"\xff{")),
    "offsets beyond the file": weighted(header(b'{"%s":{"dtype":"F32","shape":[4,64],"data_offsets":[0,1024]}}' % Q)),
    "negative offsets": weighted(header(b'{"%s":{"dtype":"F32","shape":[4,64],"data_offsets":[-8,1016]}}' % Q)),
    "numbers that are none": weighted(save({Q.decode(): np.full((4, 64), np.nan, np.float32)})),
    "no tensors": weighted(header(b"{}")),
    "a deep config": lambda _, files: files.update({ADAPTER_CONFIG: b'{"a":' * 50_000}),
    "another kind of adapter": configured(peft_type="IA3"),
    "a runtime that loads code": configured(megatron_config={"x": 1}, eva_config={"x": 1}),
    "a rank beyond the limit": configured(r=10**9),
    "weights of nothing": weighted(b""),
}


@on_server
@pytest.mark.parametrize("case", ARCHIVES)
@pytest.mark.attack(AREA, "an adapter that is imported")
async def test_a_hostile_adapter_is_refused(server: Server, case: str) -> None:
    reply = await server.alice.send(
        "POST",
        f"/api/v1/import_weights?name=evil-{len(case)}",
        content=adapter_tar(ARCHIVES[case]),
        headers={"Content-Type": "application/x-tar"},
    )
    assert 400 <= reply.status_code < 500, reply.text
    left = server.stack.settings.imports
    assert not left.exists() or not [*left.iterdir()]


@on_server
@pytest.mark.attack(AREA, "an adapter that is sent compressed, cut off, or sparse")
async def test_an_archive_that_is_none_is_refused(server: Server, tries: Tries) -> None:
    good = adapter_tar()
    # A plain file that says it is 8 GiB, and negative sizes in base 256.
    sized = bytearray(good)
    sized[124:136] = b"\x80" + (8 << 30).to_bytes(11, "big")
    negative = bytearray(good)
    negative[124:136] = b"\xff" * 12
    for content in (gzip.compress(good), good[:1000], b"", bytes(sized), bytes(negative), b"\0" * 2048):
        reply = await server.alice.send(
            "POST", "/api/v1/import_weights?name=x", content=content, headers={"Content-Type": "application/x-tar"}
        )
        assert 400 <= reply.status_code < 500, reply.text
        tries(1)


@pytest.mark.proves("Never again: `auto_mapping` of an imported adapter was kept as sent")
@on_server
@pytest.mark.attack(AREA, "a config that names modules to import (L9)")
async def test_of_the_config_of_an_adapter_only_known_keys_are_kept(server: Server) -> None:
    evil = {"auto_mapping": {"base_model_class": "x", "parent_library": "os"}, "revision": "evil", "runtime_config": {}}
    reply = await server.alice.send(
        "POST",
        "/api/v1/import_weights?name=mapped",
        content=adapter_tar(configured(**evil, exclude_modules=["evil"], peft_version="evil")),
        headers={"Content-Type": "application/x-tar"},
    )
    assert reply.status_code == 200, reply.text
    (file,) = server.stack.settings.checkpoint_folder.glob(f"*/weights/mapped@*/{ADAPTER_CONFIG}")
    kept = json.loads(file.read_text(encoding="utf-8"))
    assert kept.keys() == {
        "peft_type", "task_type", "base_model_name_or_path", "r", "lora_alpha", "lora_dropout", "bias",
        "target_modules", "target_parameters", "inference_mode",
    }  # fmt: skip
    assert kept["target_modules"] == ["model.layers.0.self_attn.q_proj"]
    assert kept["base_model_name_or_path"] == BASE
    assert "evil" not in file.read_text(encoding="utf-8")


@on_server
@pytest.mark.attack(AREA, "kill -9 of the orchestrator after all of this")
async def test_the_server_is_well_after_all_of_this_and_a_kill(server: Server) -> None:
    await server.stack.orchestrator.kill()
    await server.stack.start_orchestrator()
    alice = server.alice
    assert (await alice.send("GET", "/health")).json()["status"] == "healthy"
    await alice.done(await alice.post("forward_backward", alice.batch(next_seq(server))))
    stepped = await alice.done(await alice.post("optim_step", alice.step(next_seq(server))))
    assert stepped["metrics"]["step"] == 1.0


@pytest.mark.attack(AREA, "files that an archive named")
def test_nothing_that_an_archive_named_was_written() -> None:
    assert not Path("/etc/evil").exists()
