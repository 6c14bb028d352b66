"""Copies of a server that runs: whoever starts from one goes on where the server was, and knows what it lost."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from strata.base.clock import SystemClock
from strata.base.errors import Code
from strata.fleet.artifacts.files import scan
from strata.train.core import client_commands, ops
from strata.train.status import views
from tests.shell.train_orchestrator.stacks import REPLY_TIMEOUT_S, Stack, running

COPIES = 'address_file = "/nonexistent/address"\ncopy_every_s = 0.3\n'


def copies(stack: Stack) -> list[Path]:
    folder = stack.settings.copies
    return sorted(each for each in folder.iterdir() if each.name.isdecimal()) if folder.is_dir() else []


async def copied(stack: Stack) -> Path:
    """A copy of all that has happened until now."""
    await stack.look(client_commands.Done, client_commands.OpenSession("session-last"), "bob")
    now_ms = SystemClock().wall_s() * 1000
    async with asyncio.timeout(REPLY_TIMEOUT_S):
        while not (found := copies(stack)) or int(found[-1].name) < now_ms:
            await stack.look(
                client_commands.Done, client_commands.OpenSession(f"session-{len(found)}-{int(now_ms)}"), "bob"
            )
            await asyncio.sleep(0.05)
    return found[-1]


async def test_a_server_goes_on_from_a_copy_and_what_is_newer_is_not_there(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "a" / "d").mkdir(mode=0o700)
    with closing(sqlite3.connect(tmp_path / "a" / "d" / "keys.db", isolation_level=None)) as keys:
        # As the API server has it.
        keys.execute("PRAGMA locking_mode = EXCLUSIVE")
        keys.execute("CREATE TABLE key (id)")
        await check_move(tmp_path)


async def check_move(tmp_path: Path) -> None:
    async with running(tmp_path / "a", server=COPIES) as stack:
        model = await stack.model()
        # Large enough to be a file beside the journal.
        first = await stack.submit(stack.batch(model, 1, [list(range(1, 1000))] * 40))
        before = stack.outputs(await stack.result(first))
        # A name that no artifact may have.
        await stack.result(await stack.submit(ops.SaveWeights(model, 2, "weights", "aux.x")))
        copy = await copied(stack)
        assert any("aux.x@2/" in file.path for file in scan(copy).files), "an agent can bring it home"
        shutil.copytree(copy, tmp_path / "b" / "d")
        lost = await stack.submit(stack.step(model, 3))
        assert isinstance(await stack.result(lost), ops.StepDone)
        assert len(copies(stack)) <= 2
    (tmp_path / "b" / "d").chmod(0o700)
    assert not (tmp_path / "b" / "d" / "copies").exists()
    async with running(tmp_path / "b", server='lost = "a host was lost"', limits="gap_s = 0.5") as moved:
        assert moved.outputs(await moved.result(first)) == before
        unknown = await moved.watch(lost)
        assert isinstance(unknown, views.ErrorResponse)
        assert unknown.code is Code.NOT_FOUND
        held = await moved.submit(moved.step(model, 4))
        reason = "operation 3 of this model did not come within 0.5 seconds; a host was lost"
        assert await moved.result(held) == ops.Failed("cancelled", reason)
        again = await moved.submit(moved.step(model, 3))
        assert isinstance(await moved.result(again), ops.StepDone)


@pytest.mark.parametrize("place", ["copy_linked", "copy_journal"])
async def test_a_server_that_dies_while_it_copies_leaves_no_half_copy(tmp_path: Path, place: str) -> None:
    async with running(tmp_path, server=COPIES, armed=(f"train.orchestrator.{place}", 0)) as stack:
        model = await stack.model()
        assert isinstance(await stack.result(await stack.submit(stack.step(model, 1))), ops.StepDone)
        whole = await copied(stack)
        assert stack.deaths == 1
        assert (whole / "journal.db").stat().st_size > 0
        assert [each.name for each in stack.settings.copies.iterdir() if not each.name.isdecimal()] in ([], [".new"])
