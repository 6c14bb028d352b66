"""The reading commands of the quickstart print the same before a backup and after its restore, on both databases."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import pytest

from strata.fleet.wire.owners import SecretRequest
from strata.hub.secret_store import KEY_FILE
from tests.e2e.blocks import blocks, steps
from tests.shell.cli_fleet.driving import HostByHand
from tests.shell.fleet_agent.running import STRATA, HubProcess, agent
from tests.shell.fleet_agent.waiting import eventually
from tests.support.postgres import find_programs

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.proves("Never again: a restore ended `logs` and `metrics` of every earlier job"),
]

PAGE: Final = Path(__file__).parents[3] / "docs" / "quickstart.md"
READING: Final = ("status", "list", "show", "logs", "metrics", "artifacts", "why", "workers")
TRAIN: Final = """\
import json, os, pathlib
model, mode = os.environ["STRATA_MODEL"], os.environ["STRATA_MODE"]
print(f"{model}-{mode}: trains")
if (model, mode) == ("mlp", "realistic"):
    raise ValueError("Input X contains NaN.")
with open(os.environ["STRATA_METRICS"], "a") as file:
    for step in (1, 2):
        values = {"test_auc": 0.9 + len(model) / 1000 + step / 100}
        print(json.dumps({"type": "metrics", "at_s": 1.0, "step": step, "values": values}), file=file)
pathlib.Path(os.environ["STRATA_OUTPUT"], "model.npz").write_text(model)
"""
MANIFEST: Final = """\
[trainers.default]
command = ["python", "train.py"]
directory = "."

[[jobs]]
model = "logistic"
mode = "oracle"

[[jobs]]
model = "mlp"
mode = "oracle"

[[jobs]]
model = "mlp"
mode = "realistic"
max_attempts = 1
"""


def reading_commands() -> list[list[str]]:
    """Those of the page, in its order, and each of the others once."""
    shown = [
        shlex.split(step.command)
        for block in blocks(PAGE.read_text(encoding="utf-8"))
        if block.language == "console"
        for step in steps(block.body)
    ]
    found = [words[1:] for words in shown if words[0] == "strata" and words[1] in READING]
    assert {words[0] for words in found} >= {"status", "why", "metrics", "logs", "artifacts"}, "the page has changed"
    more = [
        "list", "list -o json", "show mlp-oracle", "show mlp-realistic", "show mlp-oracle -o json",
        "logs mlp-oracle --attempt 1", "logs mlp-realistic", "logs huge", "metrics --over-time mlp-oracle", "metrics",
        "artifacts list -o json", "why mlp-oracle", "workers", "status -o json",
    ]  # fmt: skip
    return found + [each.split() for each in more]


@dataclass(frozen=True)
class Command:
    """`strata` as a process, of a person who is logged in."""

    environ: dict[str, str]
    folder: Path

    def __call__(self, *words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [STRATA, *words],
            env=self.environ,
            cwd=cwd or self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )

    def succeeds(self, *words: str) -> str:
        done = self(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest) -> str:
    return "" if request.param == "sqlite" else str(request.getfixturevalue("postgres_url"))


@pytest.fixture
def hub(tmp_path: Path, database: str) -> Iterator[HubProcess]:
    process = HubProcess(tmp_path, database=database)
    yield process
    process.close()


@pytest.fixture
def strata(tmp_path: Path, hub: HubProcess) -> Command:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("STRATA_")}  # noqa: TID251
    home = tmp_path / "home"
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    (folder / "manifest.toml").write_text(MANIFEST)
    environ = kept | {"HOME": str(home), "XDG_CONFIG_HOME": str(home / "config"), "XDG_DATA_HOME": str(home / "data")}
    made = Command(environ | {"COLUMNS": "100"}, folder)
    made.succeeds("login", hub.address, "--token-file", str(hub.data / "operator.token"))
    return made


def read_all(strata: Command, folder: Path) -> dict[str, Any]:
    """What each command prints, without how long ago something was, and the files that `get` has written."""
    folder.mkdir()
    printed: dict[str, Any] = {}
    for words in reading_commands():
        done = strata(*words, cwd=folder)
        text = re.sub(r"\b\d+[smhd]\b", "TIME", done.stdout + done.stderr)
        printed[" ".join(words)] = (done.returncode, re.sub(r" {2,}", "  ", text))
    printed["files"] = {path.name: path.read_bytes() for path in sorted((folder / "best").iterdir())}
    return printed


def back_up_and_restore(strata: Command, hub: HubProcess, database: str, kept: Path) -> None:
    where = ["--data", str(hub.data), *(["--database", database] if database else [])]
    done = strata("backup", str(kept), "--all", *where)
    assert done.returncode == 0, done.stderr
    dump: list[str] = next((line.split() for line in done.stderr.splitlines() if line.startswith("pg_dump")), [])
    if database:
        subprocess.run([find_programs() / "pg_dump", *dump[1:]], check=True, timeout=60)
    hub.kill()
    shutil.rmtree(hub.data)
    if database:
        restore = ["pg_restore", "--clean", f"--dbname={database}", str(kept / "hub.dump")]
        subprocess.run([find_programs() / restore[0], *restore[1:]], check=True, timeout=60)
    strata.succeeds("restore", str(kept), *where)
    hub.start()


def online(strata: Command) -> Literal[True] | None:
    return True if "(online)" in strata.succeeds("status") else None


def test_the_quickstarts_reading_commands_print_the_same_before_and_after_backup_and_restore(
    strata: Command, hub: HubProcess, database: str, tmp_path: Path
) -> None:
    with agent(hub, tmp_path, "laptop"):
        eventually(lambda: online(strata))
        assert strata("apply", "manifest.toml", "--wait").returncode == 100, "one of the three fails"
        strata.succeeds("run", "--detach", "--name", "huge", "--ram", "4096", "--", "python", "train.py")
        before = read_all(strata, tmp_path / "before")
        assert "mlp-oracle: trains" in before["logs mlp-oracle"][1]
        assert before["logs mlp-oracle --attempt 1"] == before["logs mlp-oracle"]
        back_up_and_restore(strata, hub, database, tmp_path / "kept")
        eventually(lambda: online(strata))
        after = read_all(strata, tmp_path / "after")
        assert after == before
        strata.succeeds("requeue", "mlp-realistic")
        strata("wait", "mlp-realistic", "--timeout", "60")
        shown = strata.succeeds("show", "mlp-realistic")
        assert re.findall(r"^attempt (\d+) on laptop: (\w+)", shown, re.MULTILINE) == [("1", "failed"), ("2", "failed")]
        for which in ((), ("--attempt", "1"), ("--attempt", "2")):
            assert strata.succeeds("logs", "mlp-realistic", *which).startswith("mlp-realistic: trains\n")


def test_an_attempt_that_a_restore_ended_keeps_its_number_and_the_next_one_is_one_more(
    strata: Command, hub: HubProcess, database: str, tmp_path: Path
) -> None:
    hub.operator.call("PUT", "/v1/secret/TOKEN", type(None), body=SecretRequest(value="for this job"))
    secret = MANIFEST.replace('directory = "."', 'directory = "."\nsecrets = ["TOKEN"]')
    (strata.folder / "manifest.toml").write_text(secret)
    strata.succeeds("apply", "manifest.toml", "--no-describe")
    host = HostByHand(hub, "here")
    held = host.claim()
    host.hub.append(held, "log", 0, b"half way\n")
    back_up_and_restore(strata, hub, database, tmp_path / "kept")
    assert (tmp_path / "kept" / KEY_FILE).stat().st_mode & 0o777 == 0o600
    assert strata.succeeds("logs", held.job_id) == "half way\n"
    again = host.claim()
    assert again.job_id == held.job_id
    assert (held.secrets, again.secrets) == ({"TOKEN": "for this job"},) * 2, "the key of the secrets was in the backup"
    host.hub.append(again, "log", 0, b"once more\n")
    host.close()
    assert strata.succeeds("logs", held.job_id) == "once more\n"
    assert strata.succeeds("logs", held.job_id, "--attempt", "1") == "half way\n"
    assert strata("logs", held.job_id, "--attempt", "3").returncode == 102
    (row,) = [line for line in strata.succeeds("list").splitlines() if "claimed" in line]
    assert row.split()[2:4] == ["claimed", "2"]
