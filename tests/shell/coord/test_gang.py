"""`strata gang` against real coordinators and workers: what it shows, what it notices, what it says when refused."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import re
import signal
import struct
import sys
import termios
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import pytest

from strata.base.secret import Secret
from strata.cli.exit_codes import ExitCode
from strata.coord.core.job_config import JobConfig
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.pb import coordinator_pb2_grpc as pb_grpc
from strata.coord.server.tokens import Claims, TokenRole, Tokens
from strata.coord.view import JobView
from tests.shell.coord.running import STRATA, CoordinatorProcess, connect, in_process, register
from tests.shell.coord.test_access import certificate, tls_files
from tests.support.busy import BUSY
from tests.support.ports import port_of, reserve_port

ROOT: Final = Path(__file__).parents[3]
WORKER: Final = Path(__file__).with_name("gang_worker.py")
WAITING: Final = ("node-1", "node-2")
LATE: Final = "node-3"
SECRET: Final = Tokens(Secret("s" * 32))


class Ended(NamedTuple):
    status: int
    out: str
    err: str


async def begin(*args: str, **environ: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        STRATA,
        "gang",
        *args,
        env={"PATH": os.defpath, **environ},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def gang(*args: str, **environ: str) -> Ended:
    process = await begin(*args, **environ)
    async with asyncio.timeout(40):
        out, err = await process.communicate()
    assert process.returncode is not None
    return Ended(process.returncode, out.decode(), err.decode())


@dataclass
class Site:
    """A coordinator, two workers that wait for a third, and that one."""

    coordinator: CoordinatorProcess
    workers: dict[str, asyncio.subprocess.Process]
    stub: pb_grpc.CoordinatorAsyncStub

    @property
    def address(self) -> str:
        return self.coordinator.address

    async def until(self, wanted: Callable[[pb.JobState], bool]) -> None:
        async with asyncio.timeout(20):
            while not wanted((await self.stub.GetJob(pb.GetJobRequest(job_id="my-run"))).job):
                await asyncio.sleep(0.02)


@asynccontextmanager
async def site(folder: Path) -> AsyncIterator[Site]:
    async with AsyncExitStack() as stack:
        guard = stack.enter_context(reserve_port())
        often = {"STRATA_COORDINATOR_JOB_HEARTBEAT_INTERVAL_S": "0.5"}
        coordinator = CoordinatorProcess(f"sqlite:{folder}/coord.db", port_of(guard), often)
        stack.push_async_callback(coordinator.close)
        await coordinator.start()
        await coordinator.serving()
        channel = await stack.enter_async_context(connect(coordinator.address))
        found = Site(coordinator, {}, pb_grpc.CoordinatorStub(channel))
        size = len(WAITING) + 1
        for worker_id in (*WAITING, LATE):
            plan = "idle" if worker_id == LATE else "wait"
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, str(WORKER), coordinator.address, worker_id, str(size), plan),
                stdout=asyncio.subprocess.PIPE,
                cwd=ROOT,
            )
            stack.push_async_callback(_end, process)
            found.workers[worker_id] = process
        for process in found.workers.values():
            assert process.stdout is not None
            async with asyncio.timeout(30):
                assert await process.stdout.readline() == b"there\n"
        await found.until(lambda job: [each.arrived for each in job.barriers] == [len(WAITING)])
        yield found


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


def row(text: str, begins: str) -> list[str]:
    """The cells of the line that begins so."""
    return next(re.split(r"\s{2,}", line.strip()) for line in text.splitlines() if line.startswith(begins))


async def test_the_table_shows_states_and_who_is_missing(tmp_path: Path) -> None:
    async with site(tmp_path) as found:
        # The third has told of its last step with a heartbeat.
        await found.until(lambda job: all(worker.HasField("step_time_ms") for worker in job.workers))
        shown = await gang("my-run", "--address", found.address)
        assert (shown.status, shown.err) == (0, "")
        assert re.match(r"my-run: generation \d+, 3 of 3 workers alive, step 3, checkpoint at step 3\n", shown.out)
        generation = row(shown.out, LATE)[2]
        for worker_id in (*WAITING, LATE):
            cells = row(shown.out, worker_id)
            assert (cells[2], cells[5]) == (generation, "3")
            assert cells[3] in ("IDLE", "TRAINING", "LOADING_DATA", "CHECKPOINTING")
            assert re.fullmatch(r"\d+\.\ds", cells[4])
            assert re.fullmatch(r"\d+(\.\d)?ms|\d+\.\ds", cells[6])
        assert {row(shown.out, worker_id)[1] for worker_id in found.workers} == {"0", "1", "2"}
        assert row(shown.out, "epoch_0")[1:3] == ["3", "2/3"]
        assert row(shown.out, "epoch_0")[-1] == LATE
        assert row(shown.out, "step 6")[1:5] == [generation, "2/3", "5.7 MiB", f"not yet, missing {LATE}"]
        assert row(shown.out, "step 3")[2:4] == ["3/3", "8.6 MiB"]
        assert row(shown.out, "corpus")[1:4] == ["0", "#.........", "15% 6/40"]

        as_json = await gang("my-run", "-o", "json", STRATA_GANG_ADDRESS=found.address)
        job = msgspec.json.decode(as_json.out, type=JobView)
        assert job.barriers[0].missing == (LATE,)
        assert {each.worker_id for each in job.workers} == set(found.workers)
        lines = (await gang("show", "my-run", "-o", "jsonl", "--address", found.address)).out.splitlines()
        assert len(lines) == 1
        wide = await gang("my-run", "-o", "wide", "--address", found.address)
        assert "strata-python/" in row(wide.out, LATE)[-1]


async def line(stream: asyncio.StreamReader | None, wanted: str, within_s: float = 20.0) -> str:
    """The next line with these words."""
    assert stream is not None
    async with asyncio.timeout(within_s):
        while True:
            found = (await stream.readline()).decode()
            assert found, f"it ended before {wanted!r}"
            if wanted in found:
                return found


async def test_a_watch_notices_a_killed_worker_and_survives_a_restart_of_the_coordinator(tmp_path: Path) -> None:
    async with site(tmp_path) as found, AsyncExitStack() as stack:
        watch = await begin("my-run", "--watch", "--address", found.address)
        stack.push_async_callback(_end, watch)
        assert "3 of 3 workers alive" in await line(watch.stdout, "my-run: ")
        began_s = time.monotonic()
        found.workers[LATE].kill()
        assert "connection lost" in await line(watch.stdout, f"WORKER_LOST {LATE}")
        noticed_s = time.monotonic() - began_s
        print(f"\na killed worker is noticed in {noticed_s:.2f} s")
        assert noticed_s <= 2.0 * BUSY
        await line(watch.stdout, "workers: 2")

        await found.coordinator.kill()
        assert "trying again" in await line(watch.stderr, "lost the coordinator")
        await found.coordinator.start()
        await line(watch.stderr, "connected again")
        await line(watch.stdout, "FAILOVER")

        watch.send_signal(signal.SIGINT)
        async with asyncio.timeout(10):
            _, err = await watch.communicate()
        assert watch.returncode == ExitCode.INTERRUPTED
        assert b"Traceback" not in err


async def test_a_coordinator_that_is_frozen_counts_as_lost_until_it_goes_on(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        guard = stack.enter_context(reserve_port())
        coordinator = CoordinatorProcess(f"sqlite:{tmp_path}/coord.db", port_of(guard))
        stack.push_async_callback(coordinator.close)
        await coordinator.start()
        await coordinator.serving()
        channel = await stack.enter_async_context(connect(coordinator.address))
        await register(pb_grpc.CoordinatorStub(channel), "w")
        watch = await begin("--watch", "--address", coordinator.address)
        stack.push_async_callback(_end, watch)
        await line(watch.stdout, "default: ")
        coordinator.signal(signal.SIGSTOP)
        assert "nothing was heard of it for" in await line(watch.stderr, "lost the coordinator")
        coordinator.signal(signal.SIGCONT)
        await line(watch.stderr, "connected again")


class Terminal:
    """A terminal of so many columns, and all that was written to it."""

    def __init__(self, columns: int, rows: int = 40) -> None:
        self.ours, self.theirs = pty.openpty()
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        os.set_blocking(self.ours, False)
        self._written = b""

    def close(self) -> None:
        os.close(self.ours)
        os.close(self.theirs)

    async def run(self, *args: str, **environ: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(STRATA, "gang", *args),
            env={"PATH": os.defpath, "TERM": "xterm", **environ},
            stdin=self.theirs,
            stdout=self.theirs,
            stderr=self.theirs,
        )

    def raw(self) -> str:
        try:
            while True:
                self._written += os.read(self.ours, 65_536)
        except BlockingIOError:
            return self._written.decode()

    def lines(self) -> list[str]:
        """Without colours and movements of the cursor."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.raw()).replace("\r", "\n").split("\n")

    async def until(self, words: str, within_s: float = 20.0) -> None:
        async with asyncio.timeout(within_s):
            while not any(words in text for text in self.lines()):
                await asyncio.sleep(0.02)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    found = Terminal(80)
    yield found
    found.close()


async def test_eighty_columns_are_enough_and_the_live_screen_says_when_it_is_cut_off(
    tmp_path: Path, terminal: Terminal
) -> None:
    async with site(tmp_path) as found, AsyncExitStack() as stack:
        once = await terminal.run("my-run", "--address", found.address)
        assert await once.wait() == 0
        assert "\x1b[" in terminal.raw(), "in colours"
        shown = terminal.lines()
        assert max(map(len, shown)) <= 80
        text = "\n".join(shown)
        for worker_id in found.workers:
            assert len(row(text, worker_id)) >= 8
        assert row(text, "epoch_0")[-1] == LATE

        watch = await terminal.run("my-run", "--watch", "--address", found.address, NO_COLOR="1")
        stack.push_async_callback(_end, watch)
        await terminal.until("q ends")
        found.workers[LATE].kill()
        await terminal.until(f"! {LATE} was lost")
        await found.coordinator.kill()
        await terminal.until("NOT CONNECTED")
        await found.coordinator.start()
        await terminal.until("FAILOVER")
        watch.send_signal(signal.SIGINT)
        async with asyncio.timeout(10):
            assert await watch.wait() == ExitCode.INTERRUPTED
        assert max(map(len, terminal.lines())) <= 80
        assert terminal.raw().rindex("\x1b[?25h") > terminal.raw().rindex("\x1b[?25l"), "the cursor is back"
        assert not any("Traceback" in text for text in terminal.lines())


async def test_a_command_is_acknowledged_by_those_it_is_for(tmp_path: Path) -> None:
    async with site(tmp_path) as found:
        told = await gang("stop", "my-run", LATE, "--reason", "disk", "-o", "jsonl", "--address", found.address)
        assert told.status == 0, told.err
        answer = msgspec.json.decode(told.out)
        assert (answer["worker"], answer["kind"]) == (LATE, "STOP")
        assert answer["answer"] in ("acknowledged", "left")
        async with asyncio.timeout(20):
            assert await found.workers[LATE].wait() == 0
        unknown = await gang("stop", "my-run", "nobody", "--address", found.address)
        assert unknown.status == ExitCode.NOT_FOUND
        assert "no worker 'nobody'" in unknown.err
        # These two take a checkpoint when their loop asks for commands, and it waits at a barrier.
        waits = await gang("checkpoint", "my-run", "--wait", "0.5", "--address", found.address)
        assert waits.status == ExitCode.UNFINISHED
        assert waits.out == ""
        assert "no checkpoint was committed in 0.5 s; the request stays" in waits.err


def token_file(folder: Path, claims: Claims) -> str:
    path = folder / f"token-{claims.job}-{claims.role.value}"
    path.write_text(SECRET.issue(claims))
    path.chmod(0o600)
    return str(path)


async def test_who_may_not_is_refused_with_4_and_told_what_to_do(tmp_path: Path) -> None:
    later_s = round(time.time()) + 3_600
    operator = token_file(tmp_path, Claims("default", TokenRole.OPERATOR, later_s))
    worker = token_file(tmp_path, Claims("default", TokenRole.WORKER, later_s))
    other = token_file(tmp_path, Claims("other", TokenRole.OPERATOR, later_s))
    # Nobody sends heartbeats for the worker.
    async with in_process(JobConfig(settle_s=0.05, heartbeat_interval_s=60.0), tokens=SECRET) as running:
        who = (("authorization", f"Bearer {Path(worker).read_text()}"),)
        await running.stub.RegisterWorker(pb.WorkerInfo(worker_id="w", incarnation="1"), metadata=who)
        at = ("--address", running.address)

        nobody = await gang(*at)
        assert (nobody.status, nobody.out) == (ExitCode.AUTH, "")
        assert "needs a token" in nobody.err
        assert "--token-file" in nobody.err
        watching = await gang("--watch", *at)
        assert (watching.status, watching.out) == (ExitCode.AUTH, "")

        assert (await gang(*at, "--token-file", operator)).out.startswith("default: generation 1, 1 of 1 workers alive")
        assert (await gang(*at, STRATA_GANG_TOKEN_FILE=worker)).status == 0
        wrong_job = await gang("default", *at, "--token-file", other)
        assert wrong_job.status == ExitCode.AUTH
        wrong_role = await gang("rebalance", "default", *at, "--token-file", worker)
        assert wrong_role.status == ExitCode.AUTH
        assert "operator" in wrong_role.err
        absent = await gang(*at, "--token-file", other)
        assert absent.status == ExitCode.NOT_FOUND
        for ended in (nobody, wrong_job, wrong_role, absent):
            assert Path(operator).read_text() not in ended.err
            assert "Traceback" not in ended.err
        Path(operator).chmod(0o644)
        assert (await gang(*at, "--token-file", operator)).status == ExitCode.USAGE


async def test_tls_is_spoken_with_the_authority_that_is_named(tmp_path: Path) -> None:
    authority = certificate("authority")
    (tmp_path / "ca.pem").write_bytes(authority.pem)
    (tmp_path / "stranger.pem").write_bytes(certificate("stranger").pem)
    async with in_process(tls=tls_files(tmp_path, certificate("server", authority))) as running:
        named = await gang("--address", running.address, "--tls-ca", str(tmp_path / "ca.pem"))
        assert named.status == ExitCode.NOT_FOUND, "it was heard: there is no job yet"
        quick = {"STRATA_GANG_PATIENCE_S": "0.2"}
        stranger = await gang("--address", running.address, "--tls-ca", str(tmp_path / "stranger.pem"), **quick)
        assert stranger.status == ExitCode.UNREACHABLE
        assert (await gang("--address", running.address, **quick)).status == ExitCode.UNREACHABLE


@pytest.mark.parametrize("args", [(), ("--watch",), ("-o", "json"), ("rebalance", "my-run")])
async def test_a_coordinator_that_is_not_there_is_3_with_its_address(args: tuple[str, ...]) -> None:
    with reserve_port() as guard:
        address = f"127.0.0.1:{port_of(guard)}"
        ended = await gang(*args, "--address", address, STRATA_GANG_PATIENCE_S="0.3")
    assert (ended.status, ended.out) == (ExitCode.UNREACHABLE, "")
    assert f"cannot reach the coordinator at {address}" in ended.err
    assert "hint: is 'strata coordinator' running there" in ended.err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("-o", "json", "--watch"), "use -o jsonl"),
        (("stop", "my-run"), "name the workers to stop, or use --all"),
        (("drain", "my-run"), "name the workers to drain, or use --all"),
        (("stop", "my-run", "w", "--all"), "not both"),
        (("stop",), "Missing argument 'JOB'"),
        (("--address", "nowhere"), "not HOST:PORT"),
        (("--address", ","), "is empty"),
        (("",), "name of the job is empty"),
        (("--token-file", "/nonexistent"), "nonexistent"),
    ],
)
async def test_what_cannot_work_is_said_at_once(args: tuple[str, ...], said: str) -> None:
    ended = await gang(*args)
    assert (ended.status, ended.out) == (ExitCode.USAGE, "")
    assert said in ended.err


async def test_a_token_is_never_sent_in_the_clear(tmp_path: Path) -> None:
    file = token_file(tmp_path, Claims("default", TokenRole.OPERATOR, 1))
    ended = await gang("--address", "coordinator.example:7070", "--token-file", file)
    assert ended.status == ExitCode.USAGE
    assert "in the clear" in ended.err


async def test_of_several_addresses_the_one_that_leads_answers() -> None:
    async with in_process(standby=True) as standby, in_process() as leader:
        await register(leader.stub, "w")
        both = f"{standby.address},{leader.address}"
        assert "1 of 1 workers alive" in (await gang("--address", both)).out


async def test_a_reader_that_leaves_ends_it_quietly() -> None:
    async with in_process() as running:
        await register(running.stub, "w")
        watch = await begin("--watch", "-o", "jsonl", "--address", running.address)
        await line(watch.stdout, '"job_id": "default"')
        transport = watch._transport.get_pipe_transport(1)  # type: ignore[attr-defined]
        transport.close()
        async with asyncio.timeout(20):
            assert await watch.wait() == ExitCode.BROKEN_PIPE
        assert watch.stderr is not None
        assert b"Traceback" not in await watch.stderr.read()
