"""Kill the hub at every failpoint of uploads, commits and removal: never a partial or unverified artifact."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from strata.base.digest import sha256_hex
from strata.base.errors import Code, StrataError
from strata.fleet.artifacts import maintenance
from strata.fleet.artifacts.ports import LineageFilter
from strata.fleet.artifacts.service import Artifacts
from tests.shell.artifacts.upload_process import GRACE_S, files_of, open_artifacts, scrub, upload

ROOT = Path(__file__).parents[3]
PROCESS = Path(__file__).with_name("upload_process.py")
TURNS = 6


def failpoints() -> list[str]:
    """Every one in the source of artifacts that an upload to disk can meet, and those of the database's thread."""
    files = [*sorted((ROOT / "src/strata/fleet/artifacts").glob("*.py")), ROOT / "src/strata/database/sqlite.py"]
    found = {name for path in files for name in re.findall(r'failpoint\("([^"]+)"\)', path.read_text())}
    return sorted(name for name in found if ".objects." not in name and not name.endswith("before_adopted"))


async def run(folder: Path, *failpoint: str) -> tuple[int, list[str]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(PROCESS),
        str(folder),
        str(TURNS),
        *failpoint,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
    )
    printed, _ = await process.communicate()
    return process.returncode or 0, printed.decode().splitlines()


def told(lines: list[str]) -> tuple[set[str], set[str]]:
    """What was acknowledged as committed and not touched since, and what may have been removed."""
    removed = {line[1:] for line in lines if line[0] == "-"}
    return {line[1:] for line in lines if line[0] == "+"} - removed, removed


async def check(folder: Path, committed: set[str]) -> None:
    async with AsyncExitStack() as stack:
        artifacts = await open_artifacts(folder, stack)
        rows = await artifacts.index.lineages(LineageFilter())
        there = {row.artifact_id for row in rows}
        assert committed <= there, "what was acknowledged stays"
        for slot in await artifacts.index.least_checked(9e9, 10_000):
            assert await artifacts.chunks.has(slot.digest), "what the index has, the store has"
        await heal(artifacts)
        for artifact_id in there:
            manifest = (await artifacts.open(artifact_id)).manifest
            for file in manifest.files:
                content = b"".join([part async for part in artifacts.read_file(artifact_id, file.path)])
                assert sha256_hex(content) == file.sha256
        for path in (folder / "artifacts/chunks").glob("*/*"):
            assert sha256_hex(path.read_bytes()) == path.name, "nothing partial is ever visible"


async def heal(artifacts: Artifacts) -> None:
    """The test damages the one common chunk on purpose; a crash may leave it so. It is found, and sent again."""
    await scrub(artifacts)
    for _ in range(3):
        try:
            await upload(artifacts, 0)
        except StrataError as error:
            if error.code is not Code.UNAVAILABLE:
                raise
            await maintenance.collect_garbage(artifacts, dry_run=False)


@pytest.mark.parametrize("failpoint", failpoints())
@pytest.mark.parametrize("skip", [0, 2])
async def test_a_hub_killed_anywhere_keeps_whole_artifacts_and_goes_on(
    failpoint: str, skip: int, tmp_path: Path
) -> None:
    async with asyncio.timeout(110):
        status, lines = await run(tmp_path, failpoint, str(skip))
        assert status == -signal.SIGKILL, f"{failpoint} was not reached"
        committed, _ = told(lines)
        await check(tmp_path, committed)
        status, lines = await run(tmp_path)
        assert status == 0
        committed, removed = told(lines)
        assert (len(committed), len(removed)) == (TURNS // 2, TURNS // 2)
        await check(tmp_path, committed)


async def test_the_rests_of_a_crash_are_collected_once_the_grace_is_over(tmp_path: Path) -> None:
    status, _ = await run(tmp_path, "artifacts.disk.before_rename", "1")
    assert status == -signal.SIGKILL
    partial = tmp_path / "artifacts/partial"
    assert len(list(partial.iterdir())) == 1
    async with AsyncExitStack() as stack:
        artifacts = await open_artifacts(tmp_path, stack)
        digests = [sha256_hex(content) for content in files_of(0).values()]
        for _ in range(3):
            # Files bear real times, and this clock began in the past.
            await artifacts.clock.advance(3e8 + GRACE_S)  # type: ignore[attr-defined]
            await maintenance.collect_garbage(artifacts, dry_run=False)
        assert list(partial.iterdir()) == []
        assert await artifacts.index.slots(digests) == {}
        assert list((tmp_path / "artifacts/chunks").glob("*/*")) == []
