"""`strata up`, stopped and started again: it forgets nothing, repeats nothing, keeps its secrets, and searches."""

from __future__ import annotations

import json
import re
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.e2e.machines import Machine

EXAMPLE: Final = Path(__file__).parents[2] / "examples" / "tabular"
HOST: Final = "pi"
WITHIN_S: Final = 120.0
GANG_PROGRAM: Final = Path(__file__).with_name("gang_program.py")
GANG: Final = """
[trainers.t]
command = ["python", "train.py", "{out}"]
directory = "code"

[[jobs]]
name = "sft"
model = "tiny"
workers = 2
"""


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path / "home", HOST)
    yield made
    made.close()


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    """The example, with its policy for this host."""
    text = (EXAMPLE / "manifest.toml").read_text(encoding="utf-8")
    path = tmp_path / "tabular" / "manifest.toml"
    path.parent.mkdir()
    text = text.replace("[hosts.trees-and-nets]", f"[hosts.{HOST}]")
    path.write_text(text.replace("priority = 10\n", "priority = 10\nhyper = { max_iter = 5 }\n"), encoding="utf-8")
    (path.parent / "train.py").write_bytes((EXAMPLE / "train.py").read_bytes())
    return path


@pytest.fixture
def sweep(manifest: Path) -> Path:
    """The example that searches, with four points and few epochs; its trainer is that of the other one."""
    path = manifest.parents[1] / "sweep" / "manifest.toml"
    path.parent.mkdir()
    text = (EXAMPLE.parent / "sweep" / "manifest.toml").read_text(encoding="utf-8")
    text = text.replace("samples = 12", "samples = 4").replace("max_iter = 30", "max_iter = 5")
    # Before the jobs that are left of the other one, which its host may take when no policy forbids it any more.
    path.write_text(text.replace('name = "search"', 'name = "search"\npriority = 20'), encoding="utf-8")
    return path


def test_one_machine_that_may_take_four_of_fourteen_goes_on_where_it_was(
    machine: Machine, manifest: Path, sweep: Path
) -> None:
    machine.up()
    assert machine.says("apply", str(manifest)) == "+14 new  ~1 trainer  ~1 host\n"
    machine.says("wait", "gbt-oracle", "gbt-realistic", "mlp-oracle", "mlp-realistic", status=100)
    jobs = machine.knows("status")["jobs"]
    assert jobs == {"pending": 10, "claimed": 0, "running": 0, "completed": 3, "failed": 1, "cancelled": 0}
    shown = machine.says("status")
    assert re.search(r"mlp-realistic +1  ValueError: Input X contains NaN\.$", shown, re.MULTILINE)
    assert max(len(line) for line in shown.splitlines()) <= 80
    text = " ".join(machine.says("why", "svm-oracle", status=6).split())
    assert "the only host is not eligible" in text
    assert f'fix: add "svm" to allow_jobs of [hosts.{HOST}]' in text
    for secret in ("data/strata/hub/operator.token", "data/strata/agent/identity/secret"):
        assert stat.S_IMODE((machine.home / secret).stat().st_mode) == 0o600
    assert machine.down() == 0
    machine.up()
    assert machine.knows("status")["jobs"] == jobs
    assert machine.says("apply", "--no-describe", str(manifest)) == "=14 unchanged\n"
    assert machine.says("apply", str(sweep), "--wait") == "+4 new  \N{MINUS SIGN}10 orphaned, kept\n"
    table = machine.says("metrics", "--sweep", "search", "--sort", "test_auc").splitlines()
    assert table[0].split()[:6] == ["ID", "JOB", "HIDDEN", "IMPUTE", "LEARNING_RATE", "TEST_AUC"]
    best_first = [float(line.split()[5]) for line in table[1:]]
    assert len(best_first) == 4
    assert best_first == sorted(best_first, reverse=True)
    assert max(map(len, table)) <= 80
    assert machine.down() == 0


def until(condition: Callable[[], bool]) -> None:
    """A look is a command of its own: not more than one in a second."""
    until_s = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < until_s, "not in time"
        time.sleep(1.0)


@pytest.mark.timeout(5 * WITHIN_S)
def test_a_job_with_two_workers_needs_no_settings_and_goes_on_after_a_restart(machine: Machine, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code = tmp_path / "code"
    for folder in (out, code):
        folder.mkdir()
    (code / "train.py").write_bytes(GANG_PROGRAM.read_bytes())
    (tmp_path / "gang.toml").write_text(GANG.format(out=out), encoding="utf-8")
    (out / "slow").touch()
    machine.up()
    assert machine.says("apply", "--no-describe", str(tmp_path / "gang.toml")) == "+1 new  ~1 trainer\n"
    committed = "the checkpoint of step 3 is committed"
    until(lambda: machine.knows("show", "sft/0")["status"] == "running")
    until(lambda: committed in machine.says("logs", "sft"))
    folder = machine.home / "data/strata/hub/coordinator"
    assert stat.S_IMODE((folder / "token.secret").stat().st_mode) == 0o600
    port = (folder / "port").read_text()
    assert machine.down() == 0
    machine.up()
    (out / "slow").unlink()
    until(lambda: machine.knows("show", "sft/0")["status"] == "completed")
    assert "goes on from the checkpoint of step" in machine.says("logs", "sft")
    assert (folder / "port").read_text() == port
    samples = [sample for file in out.glob("model-*.json") for sample in json.loads(file.read_text("utf-8"))]
    assert sorted(samples) == list(range(40)), "every sample once"
    assert machine.down() == 0
