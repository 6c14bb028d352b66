"""The three starts of the README, each as a stranger follows it: a new folder, a new environment, the built wheel.

Versions are the newest of the index, as a person gets them. Only the ports differ: the usual ones may be in use here.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Final

import pytest

from tests.e2e.blocks import Step, blocks, matches, steps
from tests.e2e.machines import ROOT, build_wheel, newcomer_environment
from tests.e2e.terminal import Terminal
from tests.support.ports import port_of, reserve_port

pytestmark = pytest.mark.timeout(1500)

LONGEST_S: Final = 300.0
SERVERS: Final = {
    "strata up": "ready",
    "strata coordinator": "leadership_acquired",
    "strata serve server.toml": "dashboard on",
}
"""The commands that keep their terminal, and what each prints when it serves."""
API_PORT: Final = "5555"
FIRST_JOBS: Final = "strata apply manifest.toml --wait"
FIRST_JOBS_S: Final = 60.0
"""From `strata up` to the end of the first jobs, on a machine that never ran it before."""
ORDINARY_LOOP_S: Final = 0.1
"""What the loop of `slowness` takes on an ordinary machine with nothing else to do."""


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("dist")).parent


def section(number: int) -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (found,) = re.findall(rf"(?ms)^### {number}\. .*?(?=^##)", text)
    return str(found)


def environment(folder: Path, dist: Path, port: str) -> dict[str, str]:
    return newcomer_environment(folder) | {
        "PIP_FIND_LINKS": str(dist),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "STRATA_COORDINATOR_LISTEN": f"127.0.0.1:{port}",
        "STRATA_WORKER_ADDRESS": f"127.0.0.1:{port}",
        "STRATA_GANG_ADDRESS": f"127.0.0.1:{port}",
        "STRATA_SERVER_PORT": port,
    }


def slowness() -> float:
    """How many times slower than an ordinary machine this one is now; 1 if it is not."""
    began_s = time.monotonic()
    for _ in range(3_000_000):
        pass
    return max(1.0, (time.monotonic() - began_s) / ORDINARY_LOOP_S)


def problem(step: Step, output: str, status: int) -> str | None:
    if status != 0:
        return f"$ {step.command}\nended with status {status}:\n{output}"
    if step.shown is not None and not matches(step.shown, output):
        return f"$ {step.command}\nshown:\n{step.shown}\nprinted:\n{output}"
    return None


@pytest.mark.parametrize("number", [1, 2, 3], ids=["fleet", "coordinator", "training-server"])
def test_a_start_of_the_readme_works_from_the_wheel_in_five_minutes(number: int, dist: Path, tmp_path: Path) -> None:
    folder = tmp_path / "new"
    folder.mkdir()
    problems = []
    before = slowness()
    with reserve_port() as guard, Terminal(folder, environment(tmp_path, dist, port := str(port_of(guard)))) as first:
        with Terminal(folder, environment(tmp_path, dist, port)) as second:
            began_s = served_s = time.monotonic()
            jobs_s: list[float] = []
            assert first.run("python3 -m venv .venv && . .venv/bin/activate") == ("", 0)
            terminal = first
            for block in blocks(section(number)):
                if block.title is not None:
                    (folder / block.title).write_text(block.body.replace(API_PORT, port), encoding="utf-8")
                elif block.language == "console":
                    for step in steps(block.body):
                        if step.command in SERVERS:
                            served_s = time.monotonic()
                            first.start(step.command, SERVERS[step.command])
                            terminal = second
                            assert second.run(". .venv/bin/activate") == ("", 0)
                        else:
                            problems.append(problem(step, *terminal.run(step.command)))
                            jobs_s += [time.monotonic() - served_s] if step.command == FIRST_JOBS else []
            took_s = time.monotonic() - began_s
            assert terminal is second, "no server was started"
        _, status = first.interrupt()
    slower = max(before, slowness())
    print(f"on a machine that is {slower:.1f} times slower than an ordinary one:")
    print(f"{took_s:.0f} s from the first command to the last; first jobs ended after {jobs_s}")
    assert "\n\n".join(filter(None, problems)) == ""
    assert status == 0
    assert took_s < LONGEST_S * slower
    assert len(jobs_s) == (number == 1)
    assert max(jobs_s, default=0.0) < FIRST_JOBS_S * slower
