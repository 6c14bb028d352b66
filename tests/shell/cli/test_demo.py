"""The pieces of `strata demo`: its folder, the reaper, what it checks at the hub, and its trainers."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from strata.base.settings import process_environment
from strata.demo.folder import LOCK, DemoFolder, base_folders, open_folder, remove_abandoned
from strata.demo.promises import FALLEN, has_fallen
from strata.demo.trainers import moons, prices, primes
from strata.fleet.wire.streams import MetricSeries
from tests.shell.fleet_agent.waiting import eventually, is_alive

REAPER: Final = (sys.executable, "-P", "-m", "strata.demo.reaper")
PARENT: Final = """
import subprocess, sys, time, os
subprocess.Popen([*sys.argv[1].split(), str(os.getpid()), *sys.argv[2:]], start_new_session=True)
time.sleep(1000)
"""
ORPHAN: Final = """
import os, subprocess, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
DETACH = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True)"
if len(sys.argv) == 2:
    # A process of a session of its own, whose parent ends: as a supervisor whose agent is killed.
    own = [sys.executable, __file__, str(folder), "orphan"]
    subprocess.run([sys.executable, "-c", DETACH, *own], check=True)
    (folder / "child").write_text(str(os.getpid()))
else:
    (folder / "orphan").write_text(str(os.getpid()))
time.sleep(1000)
"""


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[DemoFolder]:
    folder = open_folder([tmp_path])
    yield folder
    os.close(folder.lock)


def series(*values: float, last: float | None) -> MetricSeries:
    count = len(values)
    at_s, steps = tuple(map(float, range(count))), tuple(range(count))
    return MetricSeries(name="loss", at_s=at_s, steps=steps, values=values, last=last, count=count, not_finite=0)


def test_the_folder_of_a_demo_is_its_users_alone(demo: DemoFolder) -> None:
    assert demo.path.stat().st_mode & 0o777 == 0o700


def test_a_folder_in_use_stays_and_an_abandoned_one_is_removed(tmp_path: Path) -> None:
    used, left = open_folder([tmp_path]), open_folder([tmp_path])
    other = tmp_path / "strata-data"
    other.mkdir()
    (tmp_path / "strata-demo-link").symlink_to(other)
    (left.path / "data").mkdir()
    mine = tmp_path / "strata-demo-my-talk"
    mine.mkdir()
    (mine / "talk.md").write_text("slides")
    os.close(left.lock)
    assert remove_abandoned([tmp_path, tmp_path]) == [left.path]
    assert not left.path.exists()
    assert (mine / "talk.md").exists(), "only its name is that of a demo"
    assert (used.path / LOCK).exists()
    assert other.exists()
    os.close(used.lock)
    assert remove_abandoned([tmp_path]) == [used.path]


def test_the_folder_of_the_session_comes_before_that_of_temporary_files(tmp_path: Path) -> None:
    assert base_folders({"XDG_RUNTIME_DIR": str(tmp_path)})[0] == tmp_path
    assert base_folders({"XDG_RUNTIME_DIR": "relative"}) == base_folders({})


@pytest.mark.parametrize("end", ["signal", "parent"])
def test_the_reaper_ends_orphans_and_removes_the_folder(tmp_path: Path, end: str) -> None:
    folder, program = tmp_path / "demo", tmp_path / "orphan.py"
    folder.mkdir()
    program.write_text(ORPHAN, encoding="utf-8")
    command = [str(folder), sys.executable, str(program), str(tmp_path)]
    if end == "signal":
        ended = subprocess.Popen([*REAPER, str(os.getpid()), *command])
    else:
        ended = subprocess.Popen([sys.executable, "-c", PARENT, " ".join(REAPER), *command])
    names = (tmp_path / "child", tmp_path / "orphan")
    eventually(lambda: all(name.exists() and name.read_text() for name in names))
    pids = [int(name.read_text()) for name in names]
    assert all(map(is_alive, pids))
    ended.send_signal(signal.SIGTERM if end == "signal" else signal.SIGKILL)
    ended.wait(30)
    eventually(lambda: not any(map(is_alive, pids)))
    eventually(lambda: not folder.exists())


def test_the_reaper_ends_with_its_command_and_leaves_the_log_to_its_parent(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    folder.mkdir()
    command = [*REAPER, str(os.getpid()), str(folder), sys.executable, "-c", "raise SystemExit(3)"]
    assert subprocess.run(command, check=False, timeout=30).returncode == 3
    assert folder.exists()


def test_the_demo_has_no_variable_that_leads_to_another_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from strata.cli.demo import own_environment

    monkeypatch.setenv("STRATA_URL", "https://hub.example")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "https://otel.example")
    environment = own_environment(tmp_path, process_environment())
    assert not {"STRATA_URL", "OTEL_EXPORTER_OTLP_ENDPOINT"} & environment.keys()
    assert environment["PATH"] == process_environment()["PATH"]
    own = {name: environment[name] for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "TMPDIR")}
    assert all(Path(place).parent == tmp_path for place in own.values())


def test_a_loss_has_fallen_when_its_last_value_is_well_below_its_first() -> None:
    assert has_fallen(series(1.0, 0.9, last=0.7), FALLEN)
    assert not has_fallen(series(1.0, 0.5, last=0.9), FALLEN)
    assert not has_fallen(series(1.0, 0.5, last=None), FALLEN)
    assert not has_fallen(series(last=None), FALLEN)


def test_the_network_of_the_demo_learns() -> None:
    source = random.Random(1)
    points = moons.make_moons(source, moons.POINTS)
    network = moons.Network(source, 8)
    before, _ = moons.evaluate(network, points)
    for _ in range(20):
        network.train(points, 1.0)
    after, accuracy = moons.evaluate(network, points)
    assert after < before * FALLEN
    assert accuracy > 0.75


def test_the_table_of_the_demo_cannot_be_fitted() -> None:
    with pytest.raises(ValueError, match="could not convert string to float: 'n/a'"):
        prices.main()


def test_the_primes_of_the_demo_are_primes() -> None:
    assert [number for number in range(30) if primes.is_prime(number)] == [2, 3, 5, 7, 11, 13, 17, 19, 23, 29]
