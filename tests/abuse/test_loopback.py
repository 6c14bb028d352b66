"""Loopback and local users: what another user of the machine, or a page in the owner's browser, gets from it: nothing.

The owner of `strata up` is the user of the tests, the attacker a real second user. So these need root, as CI has.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from strata.base.errors import Code, StrataError
from strata.base.unix_socket import connect_unix, listen_unix
from strata.cli.exit_codes import ExitCode
from strata.cli.fleet.logs import escape_control
from strata.cli.main import run
from strata.cli.output import Format
from strata.cli.rows import Column, Rows
from strata.coord import settings as coord_settings
from strata.coord.pb import coordinator_pb2 as pb
from strata.train import settings as train_settings
from tests.e2e.machines import STRATA, Machine, Person
from tests.shell.cli import test_gang_screen as gang
from tests.shell.train_api.processes import Processes, serving
from tests.support.ports import port_of, reserve_port

AREA: Final = "loopback and local users"
NOBODY: Final = 65_534
# Debian's own: a virtual environment may lie where another user cannot read.
PYTHON: Final = shutil.which("python3", path="/usr/bin:/bin") or "python3"
# Listens in the owner's place, writes down all it hears, and answers what a client may take for a hub.
THIEF: Final = """
import os, socket, sys, threading
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
reply = b"HTTP/1.1 200 OK\\r\\nContent-Type: application/json\\r\\nContent-Length: 2\\r\\n\\r\\n{}"
def serve(connection):
    connection.settimeout(2)
    try:
        while data := connection.recv(65536):
            os.write(int(sys.argv[2]), data)
            connection.sendall(reply)
    except OSError:
        pass
print("ready", flush=True)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""
CONNECT: Final = """
import socket, sys
try:
    socket.socket(socket.AF_UNIX).connect(sys.argv[1])
except OSError as error:
    print(type(error).__name__)
else:
    print("connected")
"""


def as_other_user(*words: str, **more: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [PYTHON, "-c", *words],
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        cwd="/",
        env={},
        stdout=subprocess.PIPE,
        text=True,
        **more,
    )


class Owner(Machine):
    """Whose `strata up` has a port of its own."""

    def __init__(self, home: Path) -> None:
        self._guard = reserve_port()
        self.port = port_of(self._guard)
        super().__init__(home, "here", f"127.0.0.1:{self.port}")
        self.url = f"http://127.0.0.1:{self.port}"
        self.data = home / "data" / "strata"

    def close(self) -> None:
        super().close()
        self._guard.close()

    def free_port(self) -> None:
        self._guard.close()

    @property
    def token(self) -> str:
        return (self.data / "hub" / "operator.token").read_text().strip()

    @property
    def secrets(self) -> list[str]:
        return [self.token, (self.data / "agent" / "identity" / "secret").read_text().strip()]

    def tries(self, *words: str, variables: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        environ = {**self.environ, **(variables or {})}
        return subprocess.run(
            [STRATA, *words], env=environ, cwd=self.home, capture_output=True, text=True, timeout=100, check=False
        )


@pytest.fixture(scope="module")
def owner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Owner]:
    made = Owner(tmp_path_factory.mktemp("owner") / "home")
    made.up()
    yield made
    made.close()


@pytest.fixture(scope="module")
def robbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Owner, Path]]:
    """`strata up` has run and is down, and another user has its port; the file has what that user hears."""
    folder = tmp_path_factory.mktemp("robbed")
    made = Owner(folder / "home")
    made.up()
    made.down()
    heard = folder / "heard"
    made.free_port()
    with heard.open("ab") as file:
        thief = as_other_user(THIEF, str(made.port), str(file.fileno()), pass_fds=[file.fileno()])
    assert thief.stdout is not None
    assert thief.stdout.readline() == "ready\n"
    yield made, heard
    thief.kill()
    thief.communicate(timeout=30)
    made.close()


def nothing_of(secrets: list[str], heard: Path) -> bytes:
    found = heard.read_bytes()
    for secret in secrets:
        assert secret.encode() not in found
        assert secret.rpartition("-")[2].encode() not in found
    return found


@pytest.mark.proves("Never again: another user who took the port of `strata up` got the operator token")
@pytest.mark.attack(AREA, "take the port while `strata up` is down; the owner runs the command line")
def test_the_command_line_sends_nothing_to_whoever_took_the_port(
    robbed: tuple[Owner, Path], tries: Callable[[int], None]
) -> None:
    owner, heard = robbed
    for words in (["status"], ["list"], ["run", "--", "true"], ["keys", "list"], ["workers"], ["doctor"]):
        done = owner.tries(*words)
        assert done.returncode != 0, words
        tries(1)
    assert "it is not running" in owner.tries("status").stderr
    assert nothing_of(owner.secrets, heard) == b""


@pytest.mark.attack(AREA, "take the port while `strata up` is down; the owner's agent runs")
def test_the_agent_sends_nothing_to_whoever_took_the_port(robbed: tuple[Owner, Path]) -> None:
    owner, heard = robbed
    variables = {"STRATA_AGENT_STATE": str(owner.data / "agent"), "STRATA_AGENT_WORK": str(owner.data / "work")}
    words = [STRATA, "agent"]
    with subprocess.Popen(words, env={**owner.environ, **variables}, stderr=subprocess.PIPE, text=True) as agent:
        assert agent.stderr is not None
        # It waits for its hub and tries again and again; one try is as good as many.
        assert any("it is not running" in line for line in agent.stderr)
        agent.kill()
    assert nothing_of(owner.secrets, heard) == b""


@pytest.mark.attack(AREA, "take the port; a context and a host from an older version have its address")
def test_old_files_with_the_address_of_the_port_send_no_secret(
    robbed: tuple[Owner, Path], tmp_path: Path, tries: Callable[[int], None]
) -> None:
    owner, heard = robbed
    config = tmp_path / "config" / "strata"
    config.mkdir(parents=True, mode=0o700)
    token = {"url": owner.url, "token_file": str(owner.data / "hub" / "operator.token"), "ca": ""}
    (config / "contexts.json").write_text(json.dumps({"current": "local", "contexts": {"local": token}}))
    state = tmp_path / "state"
    shutil.copytree(owner.data / "agent", state)
    member = json.loads((state / "identity" / "hub.json").read_text())
    (state / "identity" / "hub.json").write_text(json.dumps(member | {"url": owner.url}))
    home = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    host = {"STRATA_AGENT_STATE": str(state), "STRATA_AGENT_WORK": str(tmp_path / "work")}
    for words, variables in (
        (["status"], home),
        (["run", "--", "true"], home),
        (["status"], {"STRATA_URL": owner.url, "STRATA_OPERATOR_TOKEN": owner.token}),
        (["login", owner.url, "--token-file", str(owner.data / "hub" / "operator.token")], home),
        (["agent"], host),
        (["leave"], host),
    ):
        done = owner.tries(*words, variables=variables)
        assert done.returncode != 0, (words, done.stderr)
        nothing_of(owner.secrets, heard)
        tries(1)


@pytest.mark.attack(AREA, "the thief of the port is heard: finding nothing means something")
def test_a_scoped_key_does_reach_whoever_took_the_port(robbed: tuple[Owner, Path]) -> None:
    """What docs/limits.md says of keys of researchers and viewers, and the proof that the thief writes down all."""
    owner, heard = robbed
    key = f"tml-0123456789ab-{'5' * 40}"
    owner.tries("status", variables={"STRATA_URL": owner.url, "STRATA_OPERATOR_TOKEN": key})
    assert key.encode() in nothing_of(owner.secrets, heard)


@pytest.mark.attack(AREA, "take the port before `strata up` starts")
def test_a_taken_port_is_said_with_a_way_out(robbed: tuple[Owner, Path]) -> None:
    owner, heard = robbed
    done = owner.tries("up", "--listen", f"127.0.0.1:{owner.port}")
    assert done.returncode == ExitCode.UNREACHABLE
    assert "--listen 127.0.0.1:0" in done.stderr
    nothing_of(owner.secrets, heard)


@pytest.mark.attack(AREA, "open the hub's Unix socket as another user")
def test_the_socket_of_the_hub_opens_for_its_owner_alone(owner: Owner) -> None:
    path = owner.data / "hub" / "hub.sock"
    assert path.is_socket()
    with as_other_user(CONNECT, str(path)) as tried:
        assert tried.communicate(timeout=30)[0] == "PermissionError\n"
    # Also where the folders would let him through.
    beside = Path("/tmp") / f"strata-{os.getpid()}.sock"
    os.link(path, beside)
    try:
        with as_other_user(CONNECT, str(beside)) as tried:
            assert tried.communicate(timeout=30)[0] == "PermissionError\n"
    finally:
        beside.unlink()


@pytest.mark.attack(AREA, "offer a socket in a folder of another user, or one that others can write to")
def test_a_socket_of_another_user_is_not_spoken_to(owner: Owner, tmp_path: Path, tries: Callable[[int], None]) -> None:
    """As uid 33: root may enter every folder."""
    folder = Path("/tmp") / f"strata-offer-{os.getpid()}"
    folder.mkdir()
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "s"))
            (folder / "s").chmod(0o666)
            listener.listen()
            listener.settimeout(0.2)
            for uid, mode, expected in ((NOBODY, 0o755, "another user"), (33, 0o777, "others can write")):
                os.chown(folder, uid, uid)
                folder.chmod(mode)
                pid = os.fork()
                if pid == 0:
                    os._exit(_refused_as(33, folder / "s", expected))
                assert os.waitpid(pid, 0)[1] == 0, expected
                with pytest.raises(TimeoutError):
                    listener.accept()
                tries(1)
    finally:
        shutil.rmtree(folder)


def _refused_as(uid: int, path: Path, expected: str) -> int:
    os.setuid(uid)
    try:
        connect_unix(path, 5.0)
    except StrataError as error:
        return 0 if expected in error.message else 2
    return 1


@pytest.mark.proves("Never again: the operator token was taken over plain TCP")
@pytest.mark.attack(AREA, "send the operator token, an admin's key and a host's secret to plain TCP")
def test_plain_tcp_takes_scoped_keys_alone(owner: Owner, tries: Callable[[int], None]) -> None:
    admin = owner.knows("keys", "create", "root", "--role", "admin")["secret"]
    for secret in (*owner.secrets, admin):
        for headers in ({"Authorization": f"Bearer {secret}"}, {"X-Operator-Token": secret}):
            reply = httpx.get(f"{owner.url}/v1/status", headers=headers)
            assert reply.status_code in (401, 403)
            tries(1)
    viewer = owner.knows("keys", "create", "browser", "--role", "viewer")["secret"]
    assert httpx.get(f"{owner.url}/v1/status", headers={"Authorization": f"Bearer {viewer}"}).status_code == 200


@pytest.mark.attack(AREA, "DNS rebinding: foreign Hosts on health, jobs and keys")
def test_a_foreign_host_header_gets_no_further_than_any_other(owner: Owner, tries: Callable[[int], None]) -> None:
    for host in ("evil.example", "evil.example:8443", "169.254.169.254"):
        for path, status in (("/v1/health", 200), ("/v1/jobs", 401), ("/v1/keys", 401)):
            reply = httpx.get(f"{owner.url}{path}", headers={"Host": host, "Origin": "http://evil.example"})
            assert reply.status_code == status
            assert not [name for name in reply.headers if name.startswith("access-control-")]
            tries(1)


@pytest.mark.attack(AREA, "CORS preflights and simple requests of a page in the owner's browser")
def test_a_page_in_the_browser_can_change_nothing(owner: Owner, tries: Callable[[int], None]) -> None:
    origin = {"Origin": "http://evil.example", "Cookie": f"token={owner.token}"}
    for path in ("/v1/jobs", "/v1/manifest/reload", "/v1/hosts/local", "/v1/keys"):
        preflight = {**origin, "Access-Control-Request-Method": "POST"}
        for reply in (
            httpx.options(f"{owner.url}{path}", headers=preflight),
            httpx.post(f"{owner.url}{path}", headers={**origin, "Content-Type": "text/plain"}, content=b"{}"),
        ):
            assert reply.status_code == 401
            assert not [name for name in reply.headers if name.startswith("access-control-")]
            tries(1)


@pytest.mark.proves("Never again: a researcher's key on `strata up` was worth an admin's")
@pytest.mark.attack(AREA, "become a researcher on `strata up`, and with a job its owner")
def test_nobody_but_the_owner_submits_jobs_to_strata_up(owner: Owner, tries: Callable[[int], None]) -> None:
    for role in ("researcher", "operator"):
        done = owner.tries("keys", "create", "anna", "--role", role)
        assert done.returncode != 0
        assert "whoever submits jobs to `strata up` is its owner" in done.stderr
        assert "run_as" in done.stderr
        tries(1)
    assert "anna" not in owner.says("keys", "list")
    mine = owner.knows("keys", "create", "notebook", "--role", "researcher", "--owner")["secret"]
    assert httpx.get(f"{owner.url}/v1/status", headers={"Authorization": f"Bearer {mine}"}).status_code == 200


@pytest.mark.attack(AREA, "start a second `strata up` on the first one's folder")
def test_a_second_strata_up_says_that_one_runs(owner: Owner) -> None:
    done = owner.tries("up", "--listen", "127.0.0.1:0")
    assert done.returncode != 0
    assert "strata up is running already" in done.stderr
    assert "strata status" in done.stderr
    assert owner.knows("status")["jobs"] is not None


EVERYWHERE: Final = ("0.0.0.0", "[::]", "0", "127.1", "", "hub.example.org", "192.168.1.5", "[::ffff:1.2.3.4]")


@pytest.mark.attack(AREA, "listen where other machines reach it, without TLS: hub and `strata up`")
def test_a_hub_without_tls_stays_on_this_machine(tmp_path: Path, tries: Callable[[int], None]) -> None:
    made = Person(tmp_path / "home")
    for command in ("up", "hub"):
        for host in EVERYWHERE:
            made.says(command, "--listen", f"{host}:0", status=ExitCode.USAGE)
            tries(1)
    assert not (made.home / "strata-hub").exists()


@pytest.mark.attack(AREA, "listen where other machines reach it, without TLS: coordinator and training server")
def test_coordinator_and_training_server_stay_on_this_machine(tries: Callable[[int], None]) -> None:
    for host in EVERYWHERE:
        with pytest.raises(StrataError) as refused:
            coord_settings.check_exposure(coord_settings.CoordinatorSettings(listen=f"{host}:7070"))
        assert refused.value.code is Code.INVALID
        with pytest.raises(StrataError) as refused:
            train_settings.check_exposure(host)
        assert refused.value.code is Code.INVALID
        tries(2)


@pytest.mark.attack(AREA, "log in, or join, in the clear to another machine")
def test_no_secret_leaves_the_machine_in_the_clear(tmp_path: Path, tries: Callable[[int], None]) -> None:
    """The addresses are of documentation: nothing is sent, or this would take as long as a connection that fails."""
    made = Person(tmp_path / "home")
    for secret in (f"tml-0123456789ab-{'0' * 40}", "0" * 48, f"fj1.{'0' * 64}.{'0' * 12}.{'0' * 40}"):
        made.says("login", "http://192.0.2.1:8443", stdin=f"{secret}\n", status=ExitCode.USAGE)
        made.says("join", "http://192.0.2.1:8443", stdin=f"{secret}\n", status=ExitCode.USAGE)
        tries(2)


# The training server


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with serving(Path(tmp_path_factory.mktemp("t")), Path("pretended"), pretended=True) as found:
        yield found


@pytest.mark.attack(AREA, "open the sockets of the training server as another user")
def test_the_sockets_of_the_training_server_open_for_its_owner_alone(
    training: Processes, tries: Callable[[int], None]
) -> None:
    sockets = [path for path in (training.data / "run").iterdir() if path.is_socket()]
    assert {"api", "requests", "outputs"} <= {path.name for path in sockets}
    for path in sockets:
        with as_other_user(CONNECT, str(path)) as tried:
            assert tried.communicate(timeout=30)[0] == "PermissionError\n"
        tries(1)


@pytest.mark.proves("Never again: the operator token was taken over plain TCP")
@pytest.mark.attack(AREA, "send the operator token and an operator's key to the training server over plain TCP")
def test_the_training_server_takes_scoped_keys_alone_over_tcp(
    training: Processes, tries: Callable[[int], None]
) -> None:
    token = (training.data / "operator.token").read_text().strip()
    with training.private(**{"X-Operator-Token": token}) as http:
        key = http.post("/v1/keys", json={"name": "olga", "role": "operator"}).json()["secret"]
        assert http.get("/v1/keys").status_code == 200
    for secret in (token, key):
        for headers in ({"X-API-Key": secret}, {"Authorization": f"Bearer {secret}"}, {"X-Operator-Token": secret}):
            for path in ("/api/v1/status", "/v1/keys"):
                assert httpx.get(f"{training.url}{path}", headers=headers, timeout=30).status_code in (401, 403)
                tries(1)
    reply = httpx.get(f"{training.url}/api/v1/status", headers={"X-API-Key": training.key}, timeout=30)
    assert reply.status_code == 200


@pytest.mark.attack(AREA, "take the port of a training server that is down; its owner asks for its status")
def test_the_command_line_sends_nothing_to_whoever_took_the_port_of_a_training_server(
    robbed: tuple[Owner, Path], tmp_path: Path
) -> None:
    owner, heard = robbed
    before = heard.read_bytes()
    config, folder = tmp_path / "train.toml", tmp_path / "data" / "run"
    config.write_text(f'[server]\nport = {owner.port}\ndata = "{tmp_path / "data"}"\n[model]\npath = "m"\n')
    folder.mkdir(parents=True, mode=0o700)
    for name in ("operator.token", "api.key"):
        (tmp_path / "data" / name).write_text("tml-0123456789ab-" + "7" * 40)
        (tmp_path / "data" / name).chmod(0o600)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for left_behind in (False, True):
        if left_behind:
            # Of a server that was killed.
            listen_unix(folder / "api").close()
        assert owner.tries("serve", "status", str(config)).returncode == ExitCode.UNREACHABLE
        assert owner.tries("weights", "import", str(adapter), "--server", str(config)).returncode != 0
    assert heard.read_bytes() == before


# What a terminal would obey


@pytest.mark.attack(AREA, "terminal escapes in an error")
def test_escape_sequences_in_an_error_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["keys", "create", "x", "--context", "\x1b]0;owned\x07", "--role", "viewer"]) == ExitCode.USAGE
    shown = capsys.readouterr().err
    assert "\x1b" not in shown
    assert "\x07" not in shown


@pytest.mark.attack(AREA, "terminal escapes, markup and bidirectional text in a name")
def test_markup_and_escape_sequences_are_shown_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    with Rows(Format.TABLE, (Column("name"),)) as rows:
        rows.add({"name": "[red]x[/red]\x1b[2J\nnext\u202eflipped"})
    assert capsys.readouterr().out.splitlines()[1] == "[red]x[/red]\\x1b[2J\\nnext\\u202eflipped"


@pytest.mark.attack(AREA, "terminal escapes in a log, on a terminal")
def test_a_terminal_gets_colours_and_progress_bars_and_nothing_else_to_obey() -> None:
    text = "\x1b[31mred\x1b[0m 10%\r20%\n\x1b]0;owned\x07\x1b[2Jgone\x9b5n"
    assert escape_control(text) == "\x1b[31mred\x1b[0m 10%\r20%\n\\x1b]0;owned\\x07\\x1b[2Jgone\\x9b5n"


@pytest.mark.attack(AREA, "terminal escapes in the names of workers and barriers")
def test_names_from_other_machines_cannot_drive_the_terminal() -> None:
    shown = gang.text(
        gang.job(gang.worker("evil\x1b[2J\nw"), barriers=[pb.BarrierState(barrier_id="[bold]b", missing=["\x07"])])
    )
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "evil\\x1b[2J\\nw" in shown
    assert "[bold]b" in shown
