"""`strata gang run` as a person runs it: with a program that crashes and hangs, interrupted, and run again."""

from __future__ import annotations

import json
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import psutil  # type: ignore[import-untyped]
import pytest

from strata.base.settings import process_environment
from tests.shell.fleet_agent.waiting import eventually, is_alive

STRATA: Final = str(Path(sys.executable).with_name("strata"))
PROGRAM: Final = Path(__file__).with_name("gang_program.py")
WITHIN_S: Final = 280
REFUSED, FAILED = 4, 100
EVERY_SAMPLE: Final = list(range(40))

pytestmark = pytest.mark.timeout(WITHIN_S + 20)


class Run:
    """One `strata gang run` with two workers."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.log = folder / "gang.log"
        # Heartbeats tell the step; by default only every 5 s.
        environment = {**process_environment(), "STRATA_COORDINATOR_JOB_HEARTBEAT_INTERVAL_S": "1"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [STRATA, "gang", "run", "--nproc", "2", "--data", "data", *options, "--", str(PROGRAM), str(folder)],
                env=environment,
                cwd=folder,
                stdout=log,
                stderr=log,
            )

    @property
    def shown(self) -> str:
        return self.log.read_text("utf-8")

    def says(self, text: str) -> None:
        until_s = time.monotonic() + WITHIN_S / 2
        while text not in self.shown:
            assert self.process.poll() is None, self.shown[-4000:]
            assert time.monotonic() < until_s, self.shown[-4000:]
            time.sleep(0.05)

    def end(self) -> int:
        return self.process.wait(WITHIN_S / 2)


@contextmanager
def running(folder: Path, *options: str) -> Iterator[Run]:
    run = Run(folder, *options)
    try:
        yield run
    finally:
        if run.process.poll() is None:
            run.process.terminate()
            run.process.wait(60)
        print(run.shown[-6000:])


def model(folder: Path) -> list[int]:
    return sorted(sample for file in folder.glob("model-*.json") for sample in json.loads(file.read_text("utf-8")))


def only_its_owner_is_its_operator(folder: Path, processes: list[psutil.Process]) -> None:
    files = [folder / name for name in ("token.secret", "worker.token", "operator.token")]
    assert [stat.S_IMODE(each.stat().st_mode) for each in (folder, *files)] == [0o700, 0o600, 0o600, 0o600]
    for secret in (each.read_text("utf-8") for each in files):
        for process in processes:
            assert secret not in " ".join((*process.cmdline(), *process.environ().values())), process
    (address,) = {
        each.cmdline()[each.cmdline().index("--listen") + 1] for each in processes if "--listen" in each.cmdline()
    }
    reset = [STRATA, "gang", "reset", "gang_program", "--address", address]
    # With nothing, as any user of the machine could; as its workers; as its operator, who is told that it runs.
    for access, status in (((), REFUSED), (("--token-file", files[1]), REFUSED), (("--token-file", files[2]), FAILED)):
        done = subprocess.run([*reset, *access], capture_output=True, check=False)
        assert done.returncode == status, done.stderr


def test_a_program_that_crashes_and_hangs_ends_with_every_sample_once(tmp_path: Path) -> None:
    for fault in ("crash", "hang"):
        (tmp_path / fault).touch()
    with running(tmp_path, "--hang-after", "10", "--job", "mine") as run:
        assert run.end() == 0
        assert "rank-0 was killed after 10 s without a step" in run.shown
        assert "WORKER_LOST rank-1" in run.shown
        assert "workers: 2" in run.shown
    (stacks,) = (tmp_path / "data" / "stacks").glob("*-rank-0.txt")
    assert "hang_here" in stacks.read_text("utf-8")
    assert model(tmp_path) == EVERY_SAMPLE

    with running(tmp_path, "--job", "mine") as again:
        assert again.end() == 100
        assert "job 'mine' is finished" in again.shown


def test_a_run_that_waits_for_its_coordinator_can_be_interrupted(tmp_path: Path) -> None:
    with running(tmp_path, "--coordinator", "127.0.0.1:9") as run:
        run.says("coordinator_unreachable 127.0.0.1:9")
        run.process.send_signal(signal.SIGINT)
        assert run.end() == 130


def test_a_run_that_is_interrupted_leaves_nothing_behind_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "slow").touch()
    with running(tmp_path) as run:
        run.says("the checkpoint of step 3 is committed")
        processes = psutil.Process(run.process.pid).children(recursive=True)
        assert len(processes) >= 4, "a coordinator, torchrun and two workers"
        only_its_owner_is_its_operator(tmp_path / "data" / "tokens", processes)
        run.process.send_signal(signal.SIGINT)
        assert run.end() == 130
        assert not [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    (tmp_path / "slow").unlink()
    with running(tmp_path) as again:
        assert again.end() == 0
        assert "job gang_program goes on from the checkpoint of step 3" in again.shown
    assert model(tmp_path) == EVERY_SAMPLE


def test_workers_that_have_not_joined_end_with_a_run_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "before").touch()
    with running(tmp_path) as run:
        eventually(lambda: len([*tmp_path.glob("process-*")]) == 2, WITHIN_S / 2)
        workers = [int(each.name.partition("-")[2]) for each in tmp_path.glob("process-*")]
        (torchrun,) = {psutil.Process(pid).ppid() for pid in workers}
        # Both at once: neither gets to end what it started.
        for each in (psutil.Process(run.process.pid), psutil.Process(torchrun)):
            each.suspend()
            each.kill()
        eventually(lambda: not any(is_alive(pid) for pid in workers), WITHIN_S / 2)
