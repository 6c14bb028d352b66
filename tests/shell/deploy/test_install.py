"""The installer, for real: users, environment, join over TLS, unit; the agent it installed trains; then all of it goes.

The package comes as a wheel of this tree, and what it needs from the package index, as for `make setup`.
"""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from strata.cli.exit_codes import ExitCode
from strata.sdk.fleet import fetch_authority, pin_of
from tests.shell.cli_fleet.driving import Person
from tests.shell.deploy.machine import PYTHON, Machine, Watch, clone_without
from tests.shell.fleet_agent.waiting import eventually
from tests.shell.fleet_http.running import Process, process
from tests.support.kernel import lets_make_overlays

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not lets_make_overlays(), reason="the kernel lets this process make no mounts"),
]

ROOT: Final = Path(__file__).parents[3]
SCRIPT: Final = ROOT / "scripts" / "install-training-worker.sh"
TRAIN: Final = """\
import os, pathlib
key = pathlib.Path("/var/lib/strata-agent/state/identity/host.key")
try:
    print("key", len(key.read_bytes()) > 0)
except OSError as error:
    print("key", type(error).__name__)
print("user", os.getuid())
pathlib.Path(os.environ["STRATA_OUTPUT"], "model.txt").write_text("trained")
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Process]:
    with process(tmp_path / "hub", "--tls", "--name", "127.0.0.1") as made:
        yield made


@pytest.fixture
def operator(
    hub: Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Person:
    person = Person(tmp_path / "home", monkeypatch, capsys)
    pin = pin_of(fetch_authority(hub.url))
    done = person.says("login", hub.url, "--token-file", str(hub.data / "operator.token"), "--ca-pin", pin)
    assert done.status == ExitCode.OK, done.err
    return person


class Installation:
    """On a machine of its own, of a wheel, for a hub."""

    def __init__(self, own: Machine, wheel: Path, hub: Process) -> None:
        self.own = own
        self._hub = hub
        self._words = [str(SCRIPT), "--hub", hub.url, "--from", str(wheel), "--python", PYTHON, "--name", "bench"]

    def says(self, *more: str, stdin: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
        kept = dict(os.environ) | environ  # noqa: TID251 - a process of its own
        return self.own.runs("sh", *self._words, *more, input=stdin, env=kept)

    def removes(self, *more: str) -> subprocess.CompletedProcess[str]:
        return self.own.runs("sh", SCRIPT, "--uninstall", *more)


@pytest.fixture
def installation(own: Machine, wheel: Path, hub: Process) -> Installation:
    return Installation(own, wheel, hub)


def trains(operator: Person, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A job from submission to completion; what it said."""
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    monkeypatch.chdir(folder)
    done = operator.says("run", "--name", "job", "--", "python", "train.py")
    assert done.status == ExitCode.OK, (done.out, done.err)
    return done.out


def test_one_command_makes_a_host_that_trains_and_another_undoes_it(
    installation: Installation, operator: Person, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = installation.own
    token = operator.says("invite").out.strip()
    secret = token.rpartition(".")[2]
    unfit = installation.says(stdin=f"{token}\n", STRATA_AGENT_MIN_FREE_GIB="1000000")
    assert (unfit.returncode, "nothing was sent to the hub" in unfit.stderr) == (1, True)
    with Watch([secret]) as watch:
        first = installation.says(stdin=f"{token}\n")
    assert first.returncode == 0, f"the token is still good: {first.stderr}"
    assert any("strata join" in line for line in watch.seen), "it was looked at while it joined"
    assert (watch.arguments, watch.environments) == (set(), set())
    assert secret not in first.stdout + first.stderr
    assert own.mode("/var/lib/strata-agent/state") == "strata-agent 700"
    assert own.mode("/var/lib/strata-agent/state/identity/host.key") == "strata-agent 600"
    written = ("/etc/strata", "/etc/systemd/system", "/opt/strata-agent/bin", "/var/lib/strata-agent")
    assert own.runs("grep", "-rl", secret, *written).stdout == ""
    verified = own.runs("systemd-analyze", "verify", "--man=no", "/etc/systemd/system/strata-agent.service")
    assert [line for line in verified.stderr.splitlines() if "strata" in line] == []

    again = installation.says()
    assert again.returncode == 0, again.stderr
    assert "is the host bench" in again.stderr
    assert "already" in again.stderr
    assert again.stdout == first.stdout

    with (tmp_path / "agent.log").open("wb") as log:
        agent = own.starts(shlex.split(first.stdout), log)
        try:
            said = trains(operator, tmp_path / "code", monkeypatch)
            refused = installation.removes()
            assert (refused.returncode, "an agent uses the state folder" in refused.stderr) == (1, True), refused.stderr
        finally:
            agent.send_signal(signal.SIGTERM)
            assert agent.wait(60) == 0, (tmp_path / "agent.log").read_text()
    assert "key FileNotFoundError" in said, "the agent's user runs the jobs, and the sandbox shows them no key"
    removed = installation.removes()
    assert removed.returncode == 0, removed.stderr
    for path in (
        "/opt/strata-agent",
        "/var/lib/strata-agent",
        "/etc/systemd/system/strata-agent.service",
        "/etc/strata/agent.env",
    ):
        assert not own.has(path), path
    assert own.runs("id", "strata-agent").returncode != 0
    (host,) = operator.says("workers", "-o", "json").value
    assert (host["host"], host["state"]) == ("bench", "left")
    assert installation.removes().returncode == 0, "twice is harmless"


def test_jobs_of_another_user_cannot_read_what_is_the_agents(
    installation: Installation, operator: Person, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the agent gets along with the few powers of root that the unit leaves it."""
    own = installation.own
    token = operator.says("invite").out.strip()
    done = installation.says("--run-as", "strata-job", STRATA_JOIN_TOKEN=token)
    assert done.returncode == 0, done.stderr
    assert own.mode("/var/lib/strata-agent/state/identity/host.key") == "root 600"
    drop_in = own.runs("cat", "/etc/systemd/system/strata-agent.service.d/run-as.conf").stdout
    (kept,) = [line.partition("=")[2] for line in drop_in.splitlines() if line.startswith("CapabilityBoundingSet=")]
    powers = "".join(f",+{word.removeprefix('CAP_').lower()}" for word in kept.split())
    bounded = ["setpriv", "--no-new-privs", f"--bounding-set=-all{powers}", f"--inh-caps=-all{powers}"]
    with (tmp_path / "agent.log").open("wb") as log:
        agent = own.starts([*bounded, *shlex.split(done.stdout)], log)
        try:
            said = trains(operator, tmp_path / "code", monkeypatch)
        finally:
            agent.send_signal(signal.SIGTERM)
            assert agent.wait(60) == 0, (tmp_path / "agent.log").read_text()
    uid = own.runs("id", "-u", "strata-job").stdout.strip()
    assert f"key FileNotFoundError\nuser {uid}\n" in said
    assert installation.removes().returncode == 0


def test_what_would_be_done_is_told_and_not_done(installation: Installation, operator: Person) -> None:
    own = installation.own
    token = operator.says("invite").out.strip()
    before = own.runs("ls", "-R", "/opt", "/etc/systemd", "/var/lib").stdout
    done = installation.says("--dry-run", stdin=f"{token}\n")
    assert done.returncode == 0, done.stderr
    assert "strata join" in done.stdout
    assert token not in done.stdout + done.stderr
    assert own.runs("ls", "-R", "/opt", "/etc/systemd", "/var/lib").stdout == before
    assert own.runs("id", "strata-agent").returncode != 0


def test_a_token_on_the_command_line_is_refused_and_not_repeated(installation: Installation) -> None:
    token = "fj1." + "a" * 64 + ".0123456789ab." + "b" * 40
    for more in ((token,), ("--token", token)):
        done = installation.says(*more)
        assert (done.returncode, token in done.stdout + done.stderr) == (1, False)
        assert "never from here" in done.stderr


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (("--python", "/bin/false"), "not Python 3.11 or newer"),
        (("--token-file", "/nowhere"), "cannot be read"),
        (("--prefix", "/tmp/x", "--run-as", "me"), "--run-as cannot be combined with --prefix"),
        (("--name",), "needs a value"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_done(
    installation: Installation, more: tuple[str, ...], reason: str
) -> None:
    done = installation.says(*more)
    assert (done.returncode, reason in done.stderr) == (1, True), done.stderr
    assert not installation.own.has("/opt/strata-agent")


def installs(own: Machine, *more: str, script: Path = SCRIPT) -> subprocess.CompletedProcess[str]:
    """As far as it gets without a hub and a package."""
    return own.runs("sh", script, "--hub", "https://hub.invalid", "--python", PYTHON, "--from", "/nowhere", *more)


def test_the_program_of_a_hub_on_the_same_machine_stays_when_the_agent_goes(own: Machine) -> None:
    for path in ("/opt/strata/bin/strata", "/opt/strata-agent/bin/anything"):
        own.runs("install", "-D", "/bin/true", path)
    done = own.runs("sh", SCRIPT, "--uninstall")
    assert done.returncode == 0, done.stderr
    assert own.has("/opt/strata/bin/strata")
    assert not own.has("/opt/strata-agent")


@pytest.mark.parametrize("more", [("--run-as", "strata-job"), ()])
def test_an_installation_is_not_given_to_another_user_with_what_its_jobs_could_write(
    own: Machine, more: tuple[str, ...]
) -> None:
    own.runs("install", "-d", "-m", "0755", "-o", "nobody", "/var/lib/strata-agent", "/var/lib/strata-agent/state")
    done = installs(own, *more)
    assert (done.returncode, "--uninstall" in done.stderr) == (1, True), done.stderr
    assert own.mode("/var/lib/strata-agent/state") == "nobody 755"
    assert not own.has("/opt/strata-agent")


@pytest.mark.parametrize("link", ["/var/lib/strata-agent", "/var/lib/strata-agent/state"])
def test_a_link_where_the_agents_folders_should_be_is_refused(own: Machine, link: str) -> None:
    own.runs("install", "-d", "-m", "0755", "/opt/victim", Path(link).parent)
    own.runs("ln", "-s", "/opt/victim", link)
    done = installs(own, "--run-as", "strata-job")
    assert (done.returncode, "is a link" in done.stderr) == (1, True), done.stderr
    assert own.mode("/opt/victim") == "root 755"


@pytest.mark.parametrize("missing", ["strata-agent.service", "strata-agent.service.d/run-as.conf"])
def test_a_script_without_its_units_says_so_before_anything_is_done(own: Machine, tmp_path: Path, missing: str) -> None:
    script = clone_without(tmp_path / "clone", missing) / "scripts" / SCRIPT.name
    done = installs(own, "--run-as", "strata-job", script=script)
    assert (done.returncode, f"{missing} is missing" in done.stderr) == (1, True), done.stderr
    assert own.runs("id", "strata-job").returncode != 0
    assert not own.has("/var/lib/strata-agent")


@pytest.mark.proves("Never again: the installer took any package of the index")
def test_a_package_that_is_not_what_was_pinned_is_not_installed(own: Machine, tmp_path: Path) -> None:
    clone = clone_without(tmp_path / "clone")
    pinned = (ROOT / "constraints-agent.txt").read_text(encoding="utf-8")
    before, name, rest = pinned.partition("rfc8785==")
    block, via, after = rest.partition("# via")
    changed = re.sub(r"sha256:[0-9a-f]{64}", "sha256:" + "0" * 64, block)
    (clone / "constraints-agent.txt").write_text(before + name + changed + via + after, encoding="utf-8")
    done = installs(own, script=clone / "scripts" / SCRIPT.name)
    assert (done.returncode != 0, "DO NOT MATCH THE HASHES" in done.stderr) == (True, True), done.stderr
    assert not own.has("/opt/strata-agent/bin/strata")


def test_a_token_file_that_others_can_read_is_refused(installation: Installation, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.touch(mode=0o644)
    done = installation.says("--token-file", str(file))
    assert (done.returncode, "can be read by others" in done.stderr) == (1, True)


def test_it_installs_for_one_person_without_users_and_services(
    installation: Installation, operator: Person, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The folder is one that only its owner may enter, so jobs cannot run as a user of their own.
    monkeypatch.setenv("STRATA_AGENT_SANDBOX_MODE", "off")
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text(operator.says("invite").out)
    prefix = tmp_path / "prefix"
    done = installation.says("--prefix", str(prefix), "--token-file", str(token))
    assert done.returncode == 0, done.stderr
    with (tmp_path / "agent.log").open("wb") as log:
        agent = subprocess.Popen(shlex.split(done.stdout), stdout=log, stderr=log)
        try:
            trains(operator, tmp_path / "code", monkeypatch)
        finally:
            agent.send_signal(signal.SIGTERM)
            agent.wait(60)
    assert installation.removes("--prefix", str(prefix)).returncode == 0
    assert not (prefix / "opt" / "strata-agent").exists()
    eventually(lambda: operator.says("workers", "-o", "json").value[0]["state"] == "left")


def test_a_run_waits_until_another_one_ends(tmp_path: Path) -> None:
    folder = tmp_path / "opt"
    folder.mkdir()
    lock = os.open(folder, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    command = ["sh", str(SCRIPT), "--uninstall", "--prefix", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as second:
        assert second.stderr is not None
        assert second.stderr.readline() == (
            f"install-training-worker: another run installs below {folder}; waiting until it ends\n"
        )
        assert second.poll() is None
        os.close(lock)
        assert second.stderr.read() == "install-training-worker: the agent is removed\n"
    assert second.returncode == 0


def test_the_scripts_have_no_finding_of_shellcheck() -> None:
    program = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run(
        [
            program,
            "-x",
            "-a",
            SCRIPT,
            SCRIPT.with_name("install-hub.sh"),
            ROOT / "deploy" / "slurm" / "strata-hosts.sbatch",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")
