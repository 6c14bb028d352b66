"""The starts of the README and of docs/starts.md, each as a stranger follows it: a clone, a new environment, an install
from the clone.

Versions are the newest of the index, as a person gets them. Only the ports differ: the usual ones may be in use here.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Final

import pytest

from tests.e2e.blocks import Step, blocks, matches, steps
from tests.e2e.machines import ROOT, checkout, newcomer_environment
from tests.e2e.terminal import Terminal
from tests.support.ports import port_of, reserve_port

pytestmark = pytest.mark.timeout(1500)

LONGEST_S: Final = 300.0
SERVERS: Final = {
    "strata demo": "/login?code=",
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


CLONE: Final = "git clone URL strata"
README: Final = "README.md"
STARTS: Final = {
    "see-it": (README, "### 1. See it"),
    "train-without-code": (README, "### 2. Train a model without code"),
    "run-a-job": (README, "### 3. Run jobs on your machines"),
    "fleet": ("docs/starts.md", "## Run jobs on your machines"),
    "coordinator": ("docs/starts.md", "## Kill a worker, keep the result"),
    "training-server": ("docs/starts.md", "## Train a model by API"),
}
MOST_LINES: Final = 8
"""Of a start on the front page."""


def section(page: str, heading: str) -> str:
    """A part of a page up to the next heading."""
    text = (ROOT / page).read_text(encoding="utf-8")
    (found,) = re.findall(rf"(?ms)^{re.escape(heading)}\n.*?(?=^##)", text)
    return str(found)


def environment(folder: Path, port: str) -> dict[str, str]:
    return newcomer_environment(folder) | {
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


def install(terminal: Terminal, folder: Path) -> None:
    """The part of the README before its first start."""
    prelude = [step for block in blocks(section(README, "## Three starts")) for step in steps(block.body)]
    assert prelude[0].command == CLONE
    checkout(folder / "strata")
    for step in prelude[1:]:
        assert terminal.run(step.command) == ("", 0)


def in_the_same_place(first: Terminal, second: Terminal) -> None:
    """The folder and the environment that the first terminal is in."""
    place, status = first.run('echo "cd $PWD && . $VIRTUAL_ENV/bin/activate"')
    assert status == 0
    assert second.run(place.strip()) == ("", 0)


def place_of(terminal: Terminal) -> Path:
    return Path(terminal.run("pwd")[0].strip())


@pytest.mark.parametrize("name", STARTS)
def test_a_start_works_from_a_clone_in_five_minutes(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "new"
    folder.mkdir()
    problems = []
    before = slowness()
    with reserve_port() as guard, Terminal(folder, environment(tmp_path, port := str(port_of(guard)))) as first:
        with Terminal(folder, environment(tmp_path, port)) as second:
            install(first, folder)
            began_s = served_s = time.monotonic()
            jobs_s: list[float] = []
            terminal = first
            for block in blocks(section(*STARTS[name])):
                if block.title is not None:
                    (place_of(terminal) / block.title).write_text(block.body.replace(API_PORT, port), encoding="utf-8")
                elif block.language == "console":
                    for step in steps(block.body):
                        if (ready := SERVERS.get(step.command)) is not None:
                            in_the_same_place(first, second)
                            served_s = time.monotonic()
                            first.start(step.command, ready)
                            terminal = second
                        else:
                            problems.append(problem(step, *terminal.run(step.command)))
                            jobs_s += [time.monotonic() - served_s] if step.command == FIRST_JOBS else []
            took_s = time.monotonic() - began_s
        status = first.interrupt()[1] if terminal is second else 0
    slower = max(before, slowness())
    print(f"on a machine that is {slower:.1f} times slower than an ordinary one:")
    print(f"{took_s:.0f} s from the first command to the last; first jobs ended after {jobs_s}")
    assert "\n\n".join(filter(None, problems)) == ""
    assert status == 0
    assert took_s < LONGEST_S * slower
    assert len(jobs_s) == (name == "fleet")
    assert max(jobs_s, default=0.0) < FIRST_JOBS_S * slower


def test_every_block_of_the_starts_is_run() -> None:
    for page in {page for page, _ in STARTS.values()}:
        text = (ROOT / page).read_text(encoding="utf-8")
        ran = sum(len(list(blocks(section(*start)))) for start in STARTS.values() if start[0] == page)
        before = len(list(blocks(section(README, "## Three starts")))) if page == README else 0
        assert len(list(blocks(text))) == ran + before
    assert [block.language for block in blocks(section(README, "## Three starts"))] == ["console"]


def test_a_start_of_the_readme_has_at_most_eight_lines() -> None:
    for page, heading in STARTS.values():
        if page == README:
            lines = sum(len(block.body.splitlines()) for block in blocks(section(page, heading)))
            assert lines <= MOST_LINES, heading
