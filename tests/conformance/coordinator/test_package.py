"""The worker in C++ as others get it: installed under a prefix, found by `find_package`, without this source tree."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from pathlib import Path

from strata import __version__
from tests.conformance.coordinator.drivers import CPP, build_cpp, run_tool
from tests.conformance.coordinator.fleet import MARKS
from tests.shell.coord_worker.running import site

pytestmark = MARKS


def installed(prefix: Path) -> Path:
    """A prefix with nothing but the package; the tree that it was built in is not mentioned there."""
    build = build_cpp(preset="default")
    run_tool(["cmake", "--install", str(build), "--prefix", str(prefix)])
    files = [each for each in prefix.rglob("*") if each.suffix in (".cmake", ".h")]
    assert {"strata_worker-config.cmake", "worker.h"} <= {each.name for each in files}
    for file in files:
        assert str(CPP) not in file.read_text(encoding="utf-8"), file
    return prefix


def configure(consumer: Path, prefix: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = ["cmake", "-S", str(consumer), "-B", str(consumer / "build"), f"-DCMAKE_PREFIX_PATH={prefix}", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={"PATH": os.defpath})


async def test_a_program_of_another_project_is_built_on_the_installed_package(tmp_path: Path) -> None:
    prefix = await asyncio.to_thread(installed, tmp_path / "prefix")
    consumer = tmp_path / "consumer"
    shutil.copytree(CPP / "consumer", consumer, ignore=shutil.ignore_patterns("build"))
    found = await asyncio.to_thread(configure, consumer, prefix)
    assert found.returncode == 0, found.stderr
    await asyncio.to_thread(run_tool, ["cmake", "--build", str(consumer / "build")])
    numbers = tmp_path / "numbers.txt"
    numbers.write_text("".join(f"{each}\n" for each in range(1000)), encoding="utf-8")
    async with site(tmp_path) as started:
        environ = {"STRATA_WORKER_ADDRESS": started.coordinator.address, "STRATA_WORKER_ID": "w"}
        program = [str(consumer / "build" / "sum-lines"), str(numbers)]
        process = await asyncio.create_subprocess_exec(*program, env=environ, stdout=asyncio.subprocess.PIPE)
        async with asyncio.timeout(60):
            said, _ = await process.communicate()
        assert (process.returncode, int(said)) == (0, sum(range(1000)))


async def test_a_program_that_wants_another_version_is_told_which_one_is_there(tmp_path: Path) -> None:
    prefix = await asyncio.to_thread(installed, tmp_path / "prefix")
    consumer = tmp_path / "consumer"
    shutil.copytree(CPP / "consumer", consumer, ignore=shutil.ignore_patterns("build"))
    wants = consumer / "CMakeLists.txt"
    wants.write_text(wants.read_text(encoding="utf-8").replace("strata_worker REQ", "strata_worker 7.1 REQ"))
    found = await asyncio.to_thread(configure, consumer, prefix)
    assert found.returncode != 0
    assert 'requested version "7.1"' in found.stderr
    assert f"version: {__version__.partition('.dev')[0]}" in found.stderr
