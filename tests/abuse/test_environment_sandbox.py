"""What the code of an environment may try: a program in the sandbox of a recipe, with secrets of the run around it."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from strata.base.errors import Code, StrataError
from strata.base.settings import process_environment
from strata.base.unix_socket import listen_unix
from strata.sdk.recipes.sandbox import Confinement, confined
from tests.shell.fleet_agent.waiting import eventually

NEEDS = ("bwrap",)
AREA = "recipe: environment"
SECRET = f"secret-{secrets.token_hex(8)}"
ATTACKS = """
import glob, json, os, socket, subprocess, sys
given = json.loads(sys.argv[1])
found = {}

def attempt(name, act):
    try:
        found[name] = act()
    except Exception as error:
        found[name] = type(error).__name__

def read(path):
    with open(path) as file:
        return file.read()

def search():
    # Everything that can be read at all, but for what is known to be the system's and the interpreter's.
    for folder, folders, names in os.walk("/"):
        known = ("/usr", "/dev", "/proc", *given["pythons"])
        folders[:] = [each for each in folders if os.path.join(folder, each) not in known]
        for name in names:
            path = os.path.join(folder, name)
            try:
                with open(path, "rb") as file:
                    if given["secret"].encode() in file.read(1 << 20):
                        yield path
            except OSError:
                pass

def connect(family, address):
    with socket.socket(family) as client:
        client.settimeout(5)
        client.connect(address)
        return "connected"

def detach():
    if os.fork() == 0:
        os.setsid()
        os.closerange(0, 1024)
        os.execv("/usr/bin/sleep", ["sleep", given["sleep"]])

found["environment"] = [name for name, value in os.environ.items() if given["secret"] in value]
found["found"] = list(search())
found["environments"] = [each for each in glob.glob("/proc/[0-9]*/environ") if given["secret"] in read(each)]
attempt("run_file", lambda: read(given["file"]))
attempt("folder", lambda: os.listdir(os.path.dirname(given["file"])))
attempt("home", lambda: os.listdir(given["home"]))
found["processes"] = [
    command for each in glob.glob("/proc/[0-9]*/cmdline")
    if (command := read(each).replace(chr(0), " ")) and "bwrap" not in command and given["program"] not in command
]
found["parent"] = os.getppid()
attempt("tcp", lambda: connect(socket.AF_INET, ("127.0.0.1", given["port"])))
attempt("unix", lambda: connect(socket.AF_UNIX, given["socket"]))
attempt("abstract", lambda: connect(socket.AF_UNIX, chr(0) + given["abstract"]))
attempt("shown", lambda: connect(socket.AF_UNIX, given["shown"]))
attempt("write", lambda: open(os.path.join(os.path.dirname(given["shown"]), "x"), "w").close())
attempt("write_root", lambda: open("/x", "w").close())
attempt("kill", lambda: os.kill(given["pid"], 0))
attempt("user_namespace", lambda: os.unshare(0x10000000) if hasattr(os, "unshare") else "PermissionError")
attempt("detach", detach)
print(json.dumps(found), flush=True)
sys.stdin.read()
"""


@contextmanager
def attacking(tmp_path: Path, given: dict[str, Any]) -> Iterator[tuple[dict[str, Any], subprocess.Popen[bytes]]]:
    program = tmp_path / "environment" / "attack.py"
    program.parent.mkdir()
    program.write_text(textwrap.dedent(ATTACKS), encoding="utf-8")
    shown = Path(given["shown"]).parent
    python = Path(sys.executable)
    confinement = Confinement(python, [(program, Path("/environment/attack.py")), (shown, shown)], [tmp_path / "run"])
    given |= {"secret": SECRET, "program": "attack.py", "pythons": [sys.prefix, sys.base_prefix]}
    with confined(confinement, [str(python), "-I", "/environment/attack.py", json.dumps(given)]) as (command, passed):
        process = subprocess.Popen(
            command, env={"PATH": "/usr/bin"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=passed
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "it said nothing"
        yield json.loads(line), process
    finally:
        process.kill()
        process.communicate()


def runs(argument: str) -> bool:
    """Whether a process of this machine has this argument."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(argument.encode() in each.read_bytes().split(b"\0"))
        except OSError:
            continue
    return any(found)


@pytest.mark.attack(AREA, "read files, variables, processes and sockets of the run, write, and stay when it ends")
def test_hostile_code_reads_nothing_of_the_run_and_does_not_outlive_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, shown = tmp_path / "run", tmp_path / "shown"
    for folder in (run, shown):
        folder.mkdir(mode=0o700)
    (run / "api.key").write_text(SECRET, encoding="utf-8")
    (tmp_path / "beside.txt").write_text(SECRET, encoding="utf-8")
    monkeypatch.setenv("TINKER_API_KEY", SECRET)
    sleep = str(100_000 + secrets.randbelow(100_000))
    abstract = f"strata-{secrets.token_hex(8)}"
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        listen_unix(run / "server.sock"),
        listen_unix(shown / "relay.sock"),
        socket.socket(socket.AF_UNIX) as hidden,
    ):
        hidden.bind(f"\0{abstract}")
        hidden.listen()
        given = {
            "file": str(run / "api.key"),
            "home": str(Path.home()),
            "port": tcp.getsockname()[1],
            "socket": str(run / "server.sock"),
            "abstract": abstract,
            "shown": str(shown / "relay.sock"),
            "pid": os.getpid(),
            "sleep": sleep,
        }
        assert SECRET in process_environment().values()
        with attacking(tmp_path, given) as (found, process):
            assert found.pop("shown") == "connected", "the one way out leads nowhere"
            assert eventually(lambda: runs(sleep))
            assert found.pop("parent") in (0, 1)
            process.kill()
            assert eventually(lambda: not runs(sleep)), "a process has outlived its run"
    home = found.pop("home")
    assert home in ("FileNotFoundError", "PermissionError") or not {".ssh", ".bashrc", ".profile"} & set(home)
    assert found == {
        "environment": [],
        "found": [],
        "environments": [],
        "run_file": "FileNotFoundError",
        "folder": "FileNotFoundError",
        "processes": [],
        "tcp": "ConnectionRefusedError",
        "unix": "FileNotFoundError",
        "abstract": "ConnectionRefusedError",
        "write": "OSError",
        "write_root": "OSError",
        "kill": "ProcessLookupError",
        "user_namespace": "PermissionError",
        "detach": None,
    }


@pytest.mark.attack(AREA, "have a folder shown that holds the run")
def test_a_folder_around_the_run_is_not_shown(tmp_path: Path) -> None:
    run = tmp_path / "project" / "run"
    run.mkdir(parents=True)
    confinement = Confinement(Path(sys.executable), [(run.parent, Path("/environment/own"))], [run])
    with pytest.raises(StrataError, match="which holds") as raised, confined(confinement, ["true"]):
        pytest.fail("it was shown")
    assert raised.value.code is Code.INVALID


@pytest.mark.attack(AREA, "run where there is no sandbox")
def test_where_there_is_no_bubblewrap_nothing_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strata.sdk.recipes.sandbox.PROGRAMS", str(tmp_path))
    confinement = Confinement(Path(sys.executable), [], [])
    with pytest.raises(StrataError, match="no sandbox for the environment") as raised, confined(confinement, ["true"]):
        pytest.fail("it started")
    assert raised.value.code is Code.PRECONDITION
    assert 'env.sandbox = "off"' in (raised.value.hint or "")
