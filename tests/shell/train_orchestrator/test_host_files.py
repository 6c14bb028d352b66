"""Files between the first host of a training server and those that joined."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import pytest
import zmq
import zmq.asyncio

from strata.base.clock import SystemClock
from strata.base.errors import Code, StrataError
from strata.train.checkpoints.checkpoint import CheckpointFile, digest_files, temporary_folder
from strata.train.core import ops
from strata.train.core.state import folder_of
from strata.train.launch.joined_host import SILENT_S, JoinedHost
from strata.train.link.host_files import (
    UNSEALED,
    FileService,
    fetch_files,
    list_files,
    remove_others,
    send_file,
)
from strata.train.link.hosts import (
    MAX_ANSWERING,
    PART_BYTES,
    FilePart,
    FileReply,
    FileRequest,
    FirstHostClient,
    Folder,
    GetSettings,
    HostLink,
    HostOrder,
    HostSettings,
    HostsListener,
    ListFiles,
    ReadPart,
    SealFile,
    WritePart,
    Written,
)
from strata.train.link.keys import ClientKeys, LinkKeys, make_keys, read_invite
from strata.train.plan.host_plan import HostReport
from strata.train.runner.host_files import copy_errors
from tests.support.manual_clock import ManualClock

pytestmark = pytest.mark.timeout(60)
SETTINGS = HostSettings("run", {"model": {"name": "tiny"}}, "/models/tiny")
MODEL = Folder("model")
T = TypeVar("T")


class Hosts(NamedTuple):
    first: Path
    endpoint: str
    keys: LinkKeys
    generation: list[int]
    service: FileService

    async def ask(
        self, what: Callable[[FirstHostClient], T], keys: ClientKeys | None = None, timeout_s: float = 20.0
    ) -> T:
        """In a thread, as a rank or a host that prepares does."""

        def run() -> T:
            link = FirstHostClient(self.endpoint, keys or self.keys.of_clients, timeout_s)
            try:
                return what(link)
            finally:
                link.close()

        return await asyncio.to_thread(run)

    async def refused(self, what: Callable[[FirstHostClient], object]) -> Code:
        with pytest.raises(StrataError) as refused:
            await self.ask(what)
        return refused.value.code


@pytest.fixture
async def hosts(tmp_path: Path) -> AsyncIterator[Hosts]:
    first, generation = tmp_path / "first", [7]
    for name in ("model", "snapshots", "checkpoints"):
        (first / name).mkdir(parents=True)
    (first / "model" / "config.json").write_bytes(b"{}")
    (first / "model" / "model.safetensors").write_bytes(bytes(range(256)) * 40_000)
    (first / "model" / "secret.txt").write_bytes(b"not of the model")
    model = digest_files([first / "model" / "config.json", first / "model" / "model.safetensors"])
    roots = {name: first / name for name in ("model", "snapshots", "checkpoints")}

    def is_current(run: str, number: int) -> bool:
        return (run, number) == ("run", generation[0])

    service = FileService(SETTINGS, roots, lambda: model, is_current, 1)  # type: ignore[arg-type]
    keys = make_keys(tmp_path / "hosts.keys")
    listener = HostsListener("tcp://127.0.0.1:*", keys, _order, service.answer)
    running = asyncio.create_task(listener.run())
    yield Hosts(first, listener.endpoint, keys, generation, service)
    running.cancel()
    await asyncio.wait([running])
    listener.close()


def _order(report: HostReport) -> HostOrder:
    return HostOrder("run", None, 10.0, refused=f"{report.name} is refused")


async def test_a_model_is_fetched_with_its_digests_and_what_is_there_is_not_fetched_again(
    hosts: Hosts, tmp_path: Path
) -> None:
    target = tmp_path / "joined"

    def fetch(first: FirstHostClient) -> dict[str, CheckpointFile]:
        files = dict(list_files(first, MODEL))
        remove_others(target, files, first.check_stop)
        fetch_files(first, MODEL, files, target)
        return files

    files = await hosts.ask(fetch)
    assert sorted(files) == ["config.json", "model.safetensors"]
    assert digest_files(target.iterdir()) == files
    untouched = (target / "config.json").stat().st_ino
    # Half of a file from an attempt that was interrupted, and a file that changed.
    whole = (target / "model.safetensors").read_bytes()
    (target / "model.safetensors").unlink()
    (target / f"model.safetensors{UNSEALED}").write_bytes(whole[: PART_BYTES + 1])
    (target / "other.json").write_bytes(b"[]")
    await hosts.ask(fetch)
    assert {path.name for path in target.iterdir()} == set(files)
    assert (target / "model.safetensors").read_bytes() == whole
    assert (target / "config.json").stat().st_ino == untouched


async def test_a_beginning_that_was_of_another_file_is_found_by_the_digest(hosts: Hosts, tmp_path: Path) -> None:
    target = tmp_path / "joined"
    target.mkdir()
    (target / f"model.safetensors{UNSEALED}").write_bytes(b"x" * 100)

    def fetch(first: FirstHostClient) -> None:
        fetch_files(first, MODEL, list_files(first, MODEL), target)

    assert await hosts.refused(fetch) is Code.CORRUPT
    await hosts.ask(fetch)
    assert digest_files([target / "model.safetensors"]) == digest_files([hosts.first / "model" / "model.safetensors"])


async def test_what_a_rank_sends_is_there_under_its_name_when_it_is_whole(hosts: Hosts, tmp_path: Path) -> None:
    file = tmp_path / "rank-00002.safetensors"
    file.write_bytes(b"0123456789" * 1_000_000)
    expected = digest_files([file])[file.name]
    folder = Folder("snapshots", ".000000000012-group.part")
    there = hosts.first / "snapshots" / ".000000000012-group.part"

    def begin(first: FirstHostClient) -> None:
        first.request(WritePart("run", 7, folder, file.name, 0, b"0123456789"), Written)

    await hosts.ask(begin)
    assert [path.name for path in there.iterdir()] == [f"{file.name}{UNSEALED}"]
    assert (
        await hosts.refused(lambda first: first.request(SealFile("run", 7, folder, file.name, expected), Written))
        is Code.CORRUPT
    )
    for _ in range(2):
        # Twice: a reply may be lost.
        await hosts.ask(lambda first: send_file(first, folder, file, expected, run="run", generation=7))
        assert [path.name for path in there.iterdir()] == [file.name]
        assert (there / file.name).read_bytes() == file.read_bytes()


async def test_a_seal_that_is_asked_for_again_while_it_runs_has_the_same_outcome(hosts: Hosts, tmp_path: Path) -> None:
    file = tmp_path / "rank-00002.safetensors"
    file.write_bytes(b"0123456789" * 3_000_000)
    folder, expected = Folder("snapshots", ".12.part"), digest_files([file])[file.name]
    await hosts.service.answer(WritePart("run", 7, folder, file.name, 0, file.read_bytes()))
    seal = SealFile("run", 7, folder, file.name, expected)
    assert await asyncio.gather(*(hosts.service.answer(seal) for _ in range(4))) == [Written()] * 4
    assert [path.name for path in (hosts.first / "snapshots" / ".12.part").iterdir()] == [file.name]


async def test_ranks_of_another_generation_write_nothing(hosts: Hosts, tmp_path: Path) -> None:
    file = tmp_path / "rank-00001.json"
    file.write_bytes(b"{}")
    folder, expected = Folder("snapshots", ".12.part"), digest_files([file])[file.name]
    for run, generation in (("run", 6), ("run", 8), ("earlier", 7)):
        code = await hosts.refused(
            lambda first, run=run, number=generation: send_file(  # type: ignore[misc]
                first, folder, file, expected, run=run, generation=number
            )
        )
        assert code is Code.STALE
    assert not list((hosts.first / "snapshots").iterdir())


@pytest.mark.parametrize(
    ("folder", "file"),
    [
        (Folder("snapshots", "000000000012-group"), "rank-00001.json"),
        (Folder("snapshots", ".12.part"), "manifest.json"),
        (Folder("snapshots", ".12.part"), "../rank-00001.json"),
        (Folder("checkpoints", "run/weights/.trained@3.00.part"), "adapter_model.safetensors"),
        (Folder("model", ".12.part"), "rank-00001.json"),
        (Folder("snapshots", "000000000012-group/.12.part"), "rank-00001.json"),
        (Folder("checkpoints", "run/weights/trained@3/.12.part"), "shard-00002-model-00001-of-00001.safetensors"),
        (Folder("checkpoints", "run/.12.part"), "shard-00002-model-00001-of-00001.safetensors"),
        (Folder("snapshots", ".12.part"), "rank-00000.json"),
        (Folder("checkpoints", "run/weights/.trained@3.00.part"), "shard-00001-model-00001-of-00001.safetensors"),
    ],
)
async def test_ranks_write_their_own_files_into_temporary_folders_alone(
    hosts: Hosts, folder: Folder, file: str
) -> None:
    code = await hosts.refused(lambda first: first.request(WritePart("run", 7, folder, file, 0, b"x"), Written))
    assert code is Code.FORBIDDEN


async def test_a_folder_of_a_checkpoint_that_rank_0_has_not_made_is_not_made(hosts: Hosts) -> None:
    saved = Path(folder_of(ops.SaveWeights("01JD8:train:0", 3, "weights", "trained" * 18)))
    folder = Folder("checkpoints", str(temporary_folder(saved, 1 << 61)))
    write = WritePart("run", 7, folder, "shard-00002-model-00001-of-00001.safetensors", 0, b"x")
    assert await hosts.refused(lambda first: first.request(write, Written)) is Code.UNAVAILABLE
    (hosts.first / "checkpoints" / folder.name).mkdir(parents=True)
    await hosts.ask(lambda first: first.request(write, Written))


async def test_nothing_is_written_while_no_generation_runs(hosts: Hosts) -> None:
    hosts.generation[0] = 0
    write = WritePart("run", 0, Folder("snapshots", ".12.part"), "rank-00001.json", 0, b"x")
    assert await hosts.refused(lambda first: first.request(write, Written)) is Code.STALE


@pytest.mark.parametrize("name", ["..", "../first", "a/../../model", "/etc", ".", "a//b", "linked", "a\0b"])
async def test_no_name_leads_out_of_the_folders(hosts: Hosts, name: str) -> None:
    (hosts.first / "snapshots" / "linked").symlink_to(hosts.first)
    folder = Folder("snapshots", name)
    assert await hosts.refused(lambda first: first.request(ReadPart(folder, "secret", 0), FilePart)) is Code.INVALID
    assert await hosts.refused(lambda first: list_files(first, folder)) is Code.INVALID
    write = WritePart("run", 7, Folder("snapshots", f"{name}/.12.part"), "rank-00001.json", 0, b"x")
    assert await hosts.refused(lambda first: first.request(write, Written)) is Code.INVALID


async def test_files_that_are_not_of_the_model_are_not_read(hosts: Hosts) -> None:
    assert (
        await hosts.refused(lambda first: first.request(ReadPart(MODEL, "secret.txt", 0), FilePart)) is Code.NOT_FOUND
    )
    assert await hosts.refused(lambda first: first.request(ListFiles(Folder("checkpoints", "none")), FilePart)) is (
        Code.NOT_FOUND
    )


async def test_files_in_folders_below_the_model_are_not_read(hosts: Hosts) -> None:
    (hosts.first / "model" / "below").mkdir()
    (hosts.first / "model" / "below" / "config.json").write_bytes(b"{}")
    read = ReadPart(Folder("model", "below"), "config.json", 0)
    assert await hosts.refused(lambda first: first.request(read, FilePart)) is Code.NOT_FOUND


async def test_only_a_file_that_is_not_there_is_said_to_be_gone(hosts: Hosts) -> None:
    folder = Folder("snapshots", "12-group")
    (hosts.first / "snapshots" / "12-group").mkdir()
    (hosts.first / "snapshots" / "12-group" / "unreadable.json").symlink_to("elsewhere")
    for file, code in (("none.json", Code.NOT_FOUND), ("unreadable.json", Code.UNAVAILABLE)):
        read = ReadPart(folder, file, 0)
        assert await hosts.refused(lambda first, read=read: first.request(read, FilePart)) is code  # type: ignore[misc]


@pytest.mark.parametrize("code", [Code.CORRUPT, Code.NOT_FOUND])
def test_damage_of_a_copy_says_nothing_of_what_it_is_a_copy_of(code: Code) -> None:
    there, here = Path("/data/snapshots/12"), Path("/data/fetched/snapshots/12")
    for folder, said in ((there, code), (here, Code.UNAVAILABLE)):
        with pytest.raises(StrataError) as raised, copy_errors(folder, there):
            raise StrataError(code, "it is damaged")
        assert raised.value.code is said


@pytest.mark.parametrize(
    "request_",
    [
        ReadPart(MODEL, "config.json", 1 << 41),
        ReadPart(MODEL, "config.json", -1),
        ReadPart(MODEL, "x" * 201, 0),
        WritePart("run", 7, Folder("snapshots", ".12.part"), "rank-00001.json", 0, bytes(PART_BYTES + 1)),
        ListFiles(Folder("snapshots", "x" * 1001)),
    ],
)
def test_a_request_has_bounds(request_: FileRequest) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(request_), type=FileRequest)


async def test_reports_are_heard_while_more_is_asked_than_is_answered(tmp_path: Path) -> None:
    asked, full = 0, asyncio.Event()

    async def never(_: FileRequest) -> FileReply:
        nonlocal asked
        asked += 1
        if asked == MAX_ANSWERING:
            full.set()
        await asyncio.Event().wait()
        return SETTINGS

    keys = make_keys(tmp_path / "hosts.keys")
    listener = HostsListener("tcp://127.0.0.1:*", keys, _order, never)
    listening = asyncio.create_task(listener.run())
    stop, link = threading.Event(), HostLink(listener.endpoint, keys.of_clients)
    askers = ThreadPoolExecutor(MAX_ANSWERING + 4)

    def ask() -> None:
        first = FirstHostClient(listener.endpoint, keys.of_clients, stop=stop)
        with contextlib.closing(first), contextlib.suppress(StrataError):
            first.request(GetSettings(), HostSettings)

    for _ in range(MAX_ANSWERING + 4):
        askers.submit(ask)
    await full.wait()
    for _ in range(20):
        link.report(HostReport(name="second", incarnation="1", version="1"))
        await link.receive()
    stop.set()
    await asyncio.to_thread(askers.shutdown)
    assert asked == MAX_ANSWERING
    link.close()
    listening.cancel()
    await asyncio.wait([listening])
    listener.close()


async def test_a_request_that_is_repeated_while_it_is_answered_is_answered_once(tmp_path: Path) -> None:
    asked: list[FileRequest] = []

    async def never(request: FileRequest) -> FileReply:
        asked.append(request)
        await asyncio.Event().wait()
        return SETTINGS

    keys = make_keys(tmp_path / "hosts.keys")
    listener = HostsListener("tcp://127.0.0.1:*", keys, _order, never)
    listening = asyncio.create_task(listener.run())
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as host:
        host.linger = 0
        keys.of_clients.secure_client(host)
        host.connect(listener.endpoint)
        report = HostReport(name="second", incarnation="1", version="1")
        for message in ((1, GetSettings()), (1, GetSettings()), (2, GetSettings()), (0, report)):
            await host.send(msgspec.msgpack.encode(message))
        # The order that answers the report, which came after all of the requests.
        await host.recv()
    assert len(asked) == 2
    listening.cancel()
    await asyncio.wait([listening])
    listener.close()


async def test_a_host_with_another_invite_is_not_heard(hosts: Hosts, tmp_path: Path) -> None:
    other = make_keys(tmp_path / "other.keys").of_clients
    half = ClientKeys(hosts.keys.server_public, other.client_public, other.client_secret)
    for keys in (other, half):
        with pytest.raises(StrataError) as silent:
            await hosts.ask(lambda first: first.request(GetSettings(), HostSettings), keys, timeout_s=1.0)
        assert silent.value.code is Code.UNAVAILABLE
    assert await hosts.ask(lambda first: first.request(GetSettings(), HostSettings)) == SETTINGS


async def test_an_invite_has_no_key_of_the_first_host_and_shows_none(hosts: Hosts, tmp_path: Path) -> None:
    from strata.base.atomic import write_json

    invite = hosts.keys.of_clients
    write_json(tmp_path / "hosts.invite", invite)
    assert read_invite(tmp_path / "hosts.invite") == invite
    assert hosts.keys.server_secret not in (tmp_path / "hosts.invite").read_text(encoding="utf-8")
    assert invite.client_secret not in repr(invite)
    (tmp_path / "hosts.invite").chmod(0o644)
    with pytest.raises(StrataError, match="can be read by group or others"):
        read_invite(tmp_path / "hosts.invite")


async def test_a_host_that_leaves_while_it_prepares_ends_its_thread_soon(tmp_path: Path) -> None:
    asked, executor = asyncio.Event(), ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(executor)

    async def never(_: FileRequest) -> FileReply:
        asked.set()
        await asyncio.Event().wait()
        return SETTINGS

    keys = make_keys(tmp_path / "hosts.keys")
    listener = HostsListener("tcp://127.0.0.1:*", keys, lambda _: HostOrder("run", None, 10.0), never)
    listening = asyncio.create_task(listener.run())
    address = listener.endpoint.removeprefix("tcp://")
    host = JoinedHost(address, tmp_path / "invite", keys.of_clients, tmp_path, SystemClock(), print)
    running = asyncio.create_task(host.run())
    await asked.wait()
    running.cancel()
    await asyncio.wait([running])
    # The only thread is free again.
    executor.submit(lambda: None).result(timeout=1.0)
    listening.cancel()
    await asyncio.wait([listening])
    listener.close()


async def test_a_host_says_that_the_first_host_is_silent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock, keys = ManualClock(), make_keys(tmp_path / "hosts.keys")
    host = JoinedHost("127.0.0.1:9", tmp_path / "invite", keys.of_clients, tmp_path, clock, print)
    await clock.advance(SILENT_S)
    running = asyncio.create_task(host.run())
    while "first_host_silent" not in caplog.text:
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running])
    assert caplog.text.count("first_host_silent") == 1
