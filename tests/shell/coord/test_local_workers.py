"""Workers of a gang on a host without torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from strata.base.clock import SystemClock
from strata.cli.coordinator import OWN_COMMAND
from strata.coord.gang import GangLauncher, GangOptions
from tests.shell.fleet_agent.waiting import eventually, is_alive

LAUNCH: Final = (sys.executable, "-P", "-m", "strata.coord.local_workers")
GANG_PROGRAM: Final = Path(__file__).parents[2] / "e2e" / "gang_program.py"
PROGRAM: Final = """
import os, sys, time
from pathlib import Path
folder, what = Path(sys.argv[1]), sys.argv[2]
rank = os.environ["RANK"]
(folder / f"{rank}-{os.getpid()}").write_text(os.environ["WORLD_SIZE"])
if what == "fail" and rank == "1":
    while len(list(folder.glob("0-*"))) < len(list(folder.glob("1-*"))):
        time.sleep(0.01)
    sys.exit(7)
time.sleep(0 if what == "end" else 1000)
"""


def launch(folder: Path, what: str, restarts: int = 0) -> subprocess.Popen[bytes]:
    program = folder / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    return subprocess.Popen([*LAUNCH, "2", str(restarts), str(program), str(folder), what])


def started(folder: Path) -> list[int]:
    """The processes of workers that have started, by what they wrote."""
    files = [path for path in folder.glob("[01]-*") if path.read_text(encoding="utf-8")]
    return [int(path.name.partition("-")[2]) for path in files]


def test_each_worker_gets_its_rank_and_the_launcher_ends_well_with_the_last(tmp_path: Path) -> None:
    assert launch(tmp_path, "end").wait(30) == 0
    ranks = {path.name.partition("-")[0]: path.read_text(encoding="utf-8") for path in tmp_path.glob("[01]-*")}
    assert ranks == {"0": "2", "1": "2"}


def test_all_workers_start_again_when_one_fails_until_the_restarts_are_used_up(tmp_path: Path) -> None:
    assert launch(tmp_path, "fail", restarts=2).wait(30) == 7
    pids = started(tmp_path)
    assert len(pids) == 6, "two workers, three times"
    assert not any(map(is_alive, pids))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_launcher_that_is_ended_leaves_no_worker(tmp_path: Path, number: signal.Signals) -> None:
    launcher = launch(tmp_path, "stay")
    eventually(lambda: len(started(tmp_path)) == 2)
    pids = started(tmp_path)
    os.kill(launcher.pid, number)
    launcher.wait(30)
    eventually(lambda: not any(map(is_alive, pids)))


async def test_a_gang_without_torchrun_outlives_a_worker_and_consumes_every_sample_once(tmp_path: Path) -> None:
    (tmp_path / "crash").touch()
    program = (str(GANG_PROGRAM), str(tmp_path))
    options = GangOptions(job="plain", workers=2, folder=tmp_path / "data", torchrun=False, program=program)
    lines: list[str] = []
    launcher = GangLauncher(options, SystemClock(), lines.append, lambda _: None)
    assert await launcher.run(OWN_COMMAND) == 0, lines
    assert not (tmp_path / "crash").exists(), "a worker crashed"
    samples = [sample for file in tmp_path.glob("model-*.json") for sample in json.loads(file.read_text("utf-8"))]
    assert sorted(samples) == list(range(40))
