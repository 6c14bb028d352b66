"""Secrets of people and hosts: not among the arguments of a process, in a child's environment, a log or a history."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from strata.base.secret import read_secret
from strata.cli.main import COMMANDS, strata
from strata.sdk.fleet import fetch_authority, pin_of
from tests.shell.cli_fleet.driving import Person
from tests.shell.deploy.machine import Watch
from tests.shell.fleet_agent.waiting import eventually
from tests.shell.fleet_http.running import STRATA, Process, process

# A trainer that tells all it was given, and all of the machine that it can see of itself.
NOSY: Final = """\
import os, pathlib
print(sorted(os.environ.items()))
print(pathlib.Path("/proc/self/cmdline").read_text())
pathlib.Path(os.environ["STRATA_OUTPUT"], "x").write_text("x")
"""


@pytest.fixture
def secure(tmp_path: Path) -> Iterator[Process]:
    with process(tmp_path / "hub", "--tls", "--name", "127.0.0.1") as made:
        yield made


@pytest.fixture
def operator(secure: Process, stranger: Person) -> Person:
    pin = pin_of(fetch_authority(secure.url))
    done = stranger.says("login", secure.url, "--token-file", str(secure.data / "operator.token"), "--ca-pin", pin)
    assert done.status == 0, done.err
    return stranger


def strata_process(*words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([STRATA, *words], capture_output=True, text=True, timeout=100, check=False, **more)


def test_joining_logging_in_and_working_show_no_secret_to_other_processes(
    operator: Person, secure: Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = operator.says("invite").out.strip()
    operators = read_secret(secure.data / "operator.token").reveal()
    state, folder = tmp_path / "state", tmp_path / "code"
    pin = pin_of(fetch_authority(secure.url))
    environ = dict(os.environ) | {"XDG_CONFIG_HOME": str(tmp_path / "other")}  # noqa: TID251 - for processes of their own
    folder.mkdir()
    (folder / "train.py").write_text(NOSY)
    with Watch([token.rpartition(".")[2], operators]) as watch:
        joined = strata_process("join", secure.url, "--name", "bench", "--state", str(state), input=token)
        assert joined.returncode == 0, joined.stderr
        login = strata_process("login", secure.url, "--ca-pin", pin, input=operators, env=environ)
        assert login.returncode == 0, login.stderr
        with (tmp_path / "agent.log").open("wb") as log:
            words = [STRATA, "agent", "--state", str(state), "--work", str(tmp_path / "work")]
            agent = subprocess.Popen(
                words,
                stdout=log,
                stderr=log,
                env=environ
                | {"STRATA_AGENT_MIN_FREE_GIB": "0", "STRATA_AGENT_SANDBOX_MODE": "off", "STRATA_JOIN_TOKEN": "x"},
            )
            monkeypatch.chdir(folder)
            try:
                said = operator.says("run", "--", "python", "train.py")
            finally:
                agent.terminate()
                agent.wait(60)
    assert said.status == 0, (said.err, (tmp_path / "agent.log").read_text())
    for part in (" join ", " login ", " agent ", "supervisor.py", "train.py"):
        assert any(part in line for line in watch.seen), f"{part} was looked at"
    assert (watch.arguments, watch.environments) == (set(), set())
    key = (state / "identity" / "host.key").read_text().splitlines()[1]
    for secret in (token.rpartition(".")[2], operators, key, "STRATA_JOIN_TOKEN"):
        for where in (said.out, said.err, joined.stderr, login.stderr, (tmp_path / "agent.log").read_text()):
            assert secret not in where
    assert secure.end()[1].count(operators) == 0


def test_the_watch_sees_a_secret_where_it_must_not_be() -> None:
    """So that finding nothing means something."""
    nothing = "import sys; sys.stdin.read()"
    command = [sys.executable, "-c", nothing, "planted-4711"]
    with Watch(["planted-4711", "planted-4712"]) as watch:
        child = subprocess.Popen(command, stdin=subprocess.PIPE, env={"X": "planted-4712"})
        eventually(lambda: watch.arguments and watch.environments)
        child.communicate()
    assert len(watch.arguments) == len(watch.environments) == 1


def test_a_token_given_at_the_prompt_is_neither_echoed_nor_in_the_shells_history(
    operator: Person, secure: Process, tmp_path: Path
) -> None:
    """In a real terminal, in an interactive bash that keeps a history."""
    token = operator.says("invite").out.strip()
    history = tmp_path / "history"
    parent, terminal = pty.openpty()
    environ = {
        "PATH": f"{Path(STRATA).parent}:/usr/bin:/bin",
        "HISTFILE": str(history),
        "HOME": str(tmp_path),
        "PS1": "$ ",
    }
    with subprocess.Popen(
        ["setsid", "--ctty", "bash", "--norc", "-i"], stdin=terminal, stdout=terminal, stderr=terminal, env=environ
    ) as shell:
        os.close(terminal)
        os.write(parent, f"strata join {secure.url} --state {tmp_path / 'state'}\n".encode())
        shown = _until(parent, b"Join token: ")
        os.write(parent, f"{token}\n".encode())
        shown += _until(parent, b"start its agent with")
        os.write(parent, b"history -w; exit\n")
        shown += _rest(parent)
        shell.wait(30)
    os.close(parent)
    assert b"this machine is the host" in shown
    assert token.encode() not in shown
    assert "strata join" in history.read_text()
    assert token not in history.read_text()


def _until(terminal: int, text: bytes) -> bytes:
    seen = b""
    while text not in seen:
        piece = os.read(terminal, 4096)
        assert piece, seen
        seen += piece
    return seen


def _rest(terminal: int) -> bytes:
    seen = b""
    while True:
        try:
            piece = os.read(terminal, 4096)
        except OSError:
            # A terminal that nobody has open any more.
            return seen
        if not piece:
            return seen
        seen += piece


def test_no_command_has_an_option_or_an_argument_that_is_a_secret() -> None:
    context = strata.make_context("strata", ["--help"], resilient_parsing=True)
    found = set()
    for name in COMMANDS:
        command = strata.get_command(context, name)
        assert command is not None
        for each in (command, *getattr(command, "commands", {}).values()):
            for parameter in each.params:
                words = {parameter.name or "", *parameter.opts}
                if any(part in word for word in words for part in ("token", "secret", "password")):
                    found.add(f"{name} {parameter.opts[0]}")
    assert {"join --token-file", "login --token-file"} <= found
    # A name, and numbers of tokens of a model.
    harmless = {"run --secret", "plan --tokens", "plan --cached-tokens"}
    assert {line for line in found if not line.endswith("-file")} == harmless
