"""One machine, one command, fourteen jobs: what a person sees who follows the first page of the documents.

`strata up` is a process; everything else is asked through the command line.
"""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).parents[2]
STRATA: Final = str(Path(sys.executable).with_name("strata"))
HOST: Final = "pi"


class Machine:
    """A home folder, and `strata up` in it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        home.mkdir()
        kept = {name: value for name, value in os.environ.items() if not name.startswith("STRATA_")}  # noqa: TID251
        self._environ = kept | {
            "HOME": str(home),
            "XDG_CONFIG_HOME": str(home / "config"),
            "XDG_DATA_HOME": str(home / "data"),
            "STRATA_HUB_KEEP_FREE_BYTES": "0",
            "STRATA_AGENT_MIN_FREE_GIB": "0",
            "COLUMNS": "80",
        }
        self._process: subprocess.Popen[str] | None = None

    def up(self) -> None:
        words = [STRATA, "up", "--listen", "127.0.0.1:0", "--name", HOST]
        self._process = subprocess.Popen(words, env=self._environ, stderr=subprocess.PIPE, text=True, cwd=self.home)
        assert self._process.stderr is not None
        said = []
        for line in self._process.stderr:
            said.append(line)
            if "ready" in line:
                return
        pytest.fail(f"strata up ended: {''.join(said)}")

    def down(self) -> int:
        """As Ctrl-C does."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)
        _, rest = self._process.communicate(timeout=60)
        assert rest.endswith("strata up: stopped\n"), rest
        return self._process.returncode

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.communicate(timeout=30)

    def says(self, *words: str, status: int = 0) -> str:
        done = subprocess.run(
            [STRATA, *words], env=self._environ, cwd=self.home, capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == status, (words, done.returncode, done.stdout, done.stderr)
        return done.stdout

    def knows(self, *words: str) -> Any:
        return json.loads(self.says(*words, "-o", "json"))


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path / "home")
    yield made
    made.close()


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    """The example, with the policy that its comment speaks of for this host, and fewer rounds for the four it takes."""
    text = (ROOT / "examples/tabular/manifest.toml").read_text()
    assert "[hosts.trees-and-nets]" in text
    path = tmp_path / "tabular" / "manifest.toml"
    path.parent.mkdir()
    text = text.replace("[hosts.trees-and-nets]", f"[hosts.{HOST}]")
    path.write_text(text.replace("priority = 10\n", "priority = 10\nhyper = { max_iter = 15 }\n"))
    (path.parent / "train.py").write_text((ROOT / "examples/tabular/train.py").read_text())
    return path


def test_fourteen_jobs_on_one_machine_that_may_take_four(machine: Machine, manifest: Path) -> None:
    machine.up()
    assert machine.says("apply", str(manifest)) == "+14 new  ~1 trainer  ~1 host\n"
    machine.says("wait", "gbt-oracle", "gbt-realistic", "mlp-oracle", "mlp-realistic", status=100)
    jobs = machine.knows("status")["jobs"]
    assert jobs == {"pending": 10, "claimed": 0, "running": 0, "completed": 3, "failed": 1, "cancelled": 0}
    _looks_right(machine)
    _explains_the_rest(machine)
    assert machine.down() == 0
    machine.up()
    assert machine.knows("status")["jobs"] == jobs, "a restart forgets nothing and repeats nothing"
    assert machine.says("apply", "--no-describe", str(manifest)) == "=14 unchanged\n"
    assert machine.down() == 0


def _looks_right(machine: Machine) -> None:
    rows = {row["job"]: row for row in machine.knows("list")}
    assert len(rows) == 14
    done = {name for name, row in rows.items() if row["status"] == "completed"}
    assert done == {"gbt-oracle", "gbt-realistic", "mlp-oracle"}
    assert {row["host"] for row in rows.values() if row["attempt"]} == {HOST}
    shown = machine.says("status")
    assert re.search(r"mlp-realistic +1  ValueError: Input X contains NaN\.$", shown, re.MULTILINE)
    assert max(len(line) for line in shown.splitlines()) <= 80
    made = machine.knows("artifacts", "list")
    assert {f"{row['model']}-{row['mode']}" for row in made} == done
    assert all(row["metrics"]["test_auc"] > 0.9 for row in made)
    assert {row["id"] for row in made} == {rows[name]["artifact"] for name in done}
    for line in machine.says("artifacts", "list", "-o", "wide").splitlines()[1:]:
        assert re.search(r"(gbt|mlp)_(oracle|realistic)/[0-9a-f]{64}/bundle\.tar\.zst$", line)
    machine.says("artifacts", "get", "gbt-oracle", "fetched")
    card = json.loads((machine.home / "fetched" / "card.json").read_text())
    assert (card["model"], card["mode"]) == ("gbt", "oracle")
    assert "auc" in machine.says("logs", "gbt-oracle")
    for secret in ("data/strata/hub/operator.token", "data/strata/agent/identity/secret"):
        assert stat.S_IMODE((machine.home / secret).stat().st_mode) == 0o600


def _explains_the_rest(machine: Machine) -> None:
    waiting = [row["job"] for row in machine.knows("list", "--status", "pending")]
    assert len(waiting) == 10
    for job in waiting:
        text = " ".join(machine.says("why", job, status=6).split())
        assert "none of 1 hosts is eligible" in text
        assert f'fix: add "{job.partition("-")[0]}" to allow_jobs of [hosts.{HOST}]' in text
