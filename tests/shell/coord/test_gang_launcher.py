"""What `strata gang run` does about workers that hang, and what it outlives."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from strata.base.clock import SystemClock
from strata.base.errors import Code, StrataError
from strata.base.secret import Secret
from strata.coord.gang import GangLauncher, GangOptions, HangWatch, dump_stacks
from strata.coord.operator import Operator, OperatorSettings
from strata.coord.server.tokens import Tokens
from strata.coord.view import IncidentView, JobView, WorkerView
from tests.shell.coord.running import in_process, register

PROGRAM = """
import faulthandler, signal, time
faulthandler.register(signal.SIGUSR1, all_threads=True)
def stuck_here():
    print("ready", flush=True)
    time.sleep(100)
stuck_here()
"""


def blank(kind: type, **fields: Any) -> Any:
    """With every field that is not given empty."""
    empty = {int: 0, str: "", float: 0.0, bool: False, dict: {}, tuple: ()}
    known = {each.name: empty.get(getattr(each.type, "__origin__", each.type)) for each in msgspec.structs.fields(kind)}
    return kind(**(known | fields))


def worker(step: int | None, status: str = "TRAINING", incarnation: str = "a") -> WorkerView:
    found = blank(WorkerView, worker_id="w", step=step, status=status, incarnation=incarnation, liveness="ALIVE")
    assert isinstance(found, WorkerView)
    return found


def job(each: WorkerView, generation: int = 1, incidents: tuple[IncidentView, ...] = ()) -> JobView:
    found = blank(JobView, workers=(each,), generation=generation, incidents=incidents)
    assert isinstance(found, JobView)
    return found


def test_a_worker_whose_step_stands_still_is_overdue_once() -> None:
    watch = HangWatch(10.0)
    assert watch.overdue(job(worker(5)), 0.0) == set()
    assert watch.overdue(job(worker(5)), 9.9) == set()
    assert watch.overdue(job(worker(5)), 10.0) == {"w"}
    assert watch.overdue(job(worker(5)), 11.0) == set(), "its time begins anew: it is being killed"


@pytest.mark.parametrize(
    "moved", [worker(6), worker(5, incarnation="b"), worker(5, "CHECKPOINTING"), worker(None)], ids=str
)
def test_a_worker_that_moved_was_restarted_or_does_something_else_is_not_overdue(moved: WorkerView) -> None:
    watch = HangWatch(10.0)
    watch.overdue(job(worker(5)), 0.0)
    assert watch.overdue(job(moved), 9.0) == set()
    assert watch.overdue(job(worker(5)), 12.0) == set()


def test_without_a_limit_only_the_coordinator_names_hung_workers() -> None:
    watch = HangWatch(None)
    watch.overdue(job(worker(5)), 0.0)
    assert watch.overdue(job(worker(5)), 1e6) == set()
    hang = IncidentView(kind="HANG", at_unix_ms=1, generation=2, worker_id="w", message="")
    assert watch.reported(job(worker(5), 3, (hang,))) == set(), "of a generation that is over"
    assert watch.reported(job(worker(5), 2, (hang,))) == {"w"}
    assert watch.reported(job(worker(5), 2, (hang,))) == set()


@pytest.mark.parametrize("with_py_spy", [True, False])
async def test_the_stacks_of_a_process_show_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_py_spy: bool
) -> None:
    if not with_py_spy:
        monkeypatch.setattr("strata.coord.gang.shutil.which", lambda *_, **__: None)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", PROGRAM, stdout=pipe, stderr=pipe)
    assert process.stdout is not None
    await process.stdout.readline()
    said = await dump_stacks(process.pid, tmp_path / "stacks" / "w.txt")
    process.kill()
    _, printed = await process.communicate()
    if with_py_spy:
        assert said == f"its stacks are in {tmp_path / 'stacks' / 'w.txt'}"
        assert "stuck_here" in (tmp_path / "stacks" / "w.txt").read_text("utf-8")
    else:
        assert b"stuck_here" in printed


async def test_stacks_that_cannot_be_written_are_printed_by_the_process(tmp_path: Path) -> None:
    """As on a full disk; root may write everywhere, but not below a file."""
    (tmp_path / "stacks").touch()
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", PROGRAM, stdout=pipe, stderr=pipe)
    assert process.stdout is not None
    await process.stdout.readline()
    said = await dump_stacks(process.pid, tmp_path / "stacks" / "w.txt")
    process.kill()
    _, printed = await process.communicate()
    assert "its stacks are not in" in said
    assert b"stuck_here" in printed


async def test_the_watch_of_a_gang_outlives_what_goes_wrong_in_it(tmp_path: Path) -> None:
    failures = [OSError(28, "No space left on device"), StrataError(Code.INTERNAL, "a defect"), KeyError("w")]
    shown = asyncio.Event()

    def show(_: JobView) -> None:
        if failures:
            raise failures.pop()
        shown.set()

    options = GangOptions(job="default", workers=1, folder=tmp_path)
    launcher = GangLauncher(options, SystemClock(), lambda _: None, show)
    async with in_process() as running:
        await register(running.stub, "w")
        async with Operator(OperatorSettings(address=running.address, job="default"), SystemClock()) as operator:
            watching = asyncio.create_task(launcher.watch(operator))
            seen = asyncio.create_task(shown.wait())
            async with asyncio.timeout(20):
                await asyncio.wait({watching, seen}, return_when=asyncio.FIRST_COMPLETED)
            assert not watching.done()
            for task in (watching, seen):
                task.cancel()
            await asyncio.wait({watching, seen})


async def test_the_watch_of_a_gang_ends_when_the_coordinator_refuses_it(tmp_path: Path) -> None:
    options = GangOptions(job="default", workers=1, folder=tmp_path)
    launcher = GangLauncher(options, SystemClock(), lambda _: None, lambda _: None)
    async with (
        in_process(tokens=Tokens(Secret("s" * 32))) as running,
        Operator(OperatorSettings(address=running.address, job="default"), SystemClock()) as operator,
        asyncio.timeout(20),
    ):
        with pytest.raises(StrataError) as refused:
            await launcher.watch(operator)
    assert refused.value.code is Code.UNAUTHENTICATED
