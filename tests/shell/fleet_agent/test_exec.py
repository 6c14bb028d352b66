"""`strata exec` with a real hub, a real agent and a job in a real sandbox."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from strata.fleet.core.jobspec import JobSpec, TrainerSpec
from strata.fleet.core.requirement import Needs
from strata.fleet.wire.events import EventsQuery, EventsReply
from strata.fleet.wire.owners import SecretRequest
from tests.shell.fleet_agent.running import STRATA, AgentProcess, HubProcess, agent
from tests.shell.fleet_agent.test_kill_anywhere import ARMED
from tests.shell.fleet_agent.waiting import eventually, is_alive

NEEDS = ("root", "bwrap")
SECRET = "a-secret-of-the-job-4711"
SLEEPER = """
import os, pathlib, time
pathlib.Path("/tmp/mark").write_text(os.environ["TOKEN"][:3])
print("up", flush=True)
time.sleep(600)
"""
DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    time.sleep(603)
print("left", flush=True)
time.sleep(604)
"""


@pytest.fixture(scope="module")
def quick_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    """Its leases are short, and so are the intervals between heartbeats."""
    made = HubProcess(tmp_path_factory.mktemp("hub"), stale_after_s=12.0)
    secret = SecretRequest(value=SECRET)
    made.operator.call("PUT", "/v1/secret/TOKEN", type(None), body=secret)
    yield made
    made.close()


def submit(hub: HubProcess, host: str) -> str:
    trainer = TrainerSpec(
        name=f"sleeper-{host}",
        command=("python", "-c", SLEEPER),
        directory="/usr/share",
        env={"GREETING": "hello"},
        secrets=("TOKEN",),
    )
    spec = JobSpec(model=host, trainer=trainer.name, needs=Needs(allowed_hosts=(host,)))
    return hub.submit_with(trainer, spec)


@contextmanager
def running_job(hub: HubProcess, name: str, program: tuple[str, ...] = (STRATA,)) -> Iterator[tuple[AgentProcess, str]]:
    """An agent of root whose jobs are in namespaces, and a job that sleeps there."""
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="strata-exec-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        folder.chmod(0o711)
        made = stack.enter_context(agent(hub, folder, name, program, sandbox_mode="required", grace_s="0"))
        job = submit(hub, name)
        hub.says(job, "up")
        hub.until(job, "running")
        yield made, job
        hub.cancel(job)
        eventually(lambda: not made.children())


class Command:
    """`strata exec` as an operator runs it."""

    def __init__(self, hub: HubProcess, *words: str) -> None:
        environ = dict(os.environ) | {  # noqa: TID251 - a process of its own
            "STRATA_URL": hub.address,
            "STRATA_OPERATOR_TOKEN_FILE": str(hub.data / "operator.token"),
        }
        self.process = subprocess.Popen(
            [STRATA, "exec", *words], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def ended(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=90)
        return self.process.returncode, out.decode(), err.decode()


def test_a_command_runs_inside_the_job_and_its_status_is_passed_on(quick_hub: HubProcess) -> None:
    with running_job(quick_hub, "vera") as (vera, job):
        script = (
            "id -u; cat /tmp/mark; echo; echo $GREETING ${TOKEN-none}; ps ax | grep -c 'time.sleep(600)';"
            " tr '\\0' '\\n' < /proc/2/environ | grep TOKEN; ls $0; echo wrong >&2; exit 7"
        )
        status, out, err = Command(quick_hub, job, "--", "sh", "-c", script, str(vera.state)).ended()
        assert status == 7, err
        lines = out.splitlines()
        assert lines[:3] == ["65534", "a-s", "hello none"], "its user, its files, its variables without its secrets"
        assert int(lines[3]) >= 1, "its processes"
        assert lines[4] == f"TOKEN={'*' * len(SECRET)}", "what it reads of secrets is not uploaded"
        assert lines[5:] == ["wrong"], "nothing of the agent"
        status, _, err = Command(quick_hub, job, "no-such-program").ended()
        assert status == 127
        (events,) = (quick_hub.operator.call("GET", "/v1/events", EventsReply, query=EventsQuery(subject=job)),)
        assert [each.kind for each in events.events].count("job.exec_ended") == 2


def test_output_is_streamed_and_bounded_and_time_is_limited(quick_hub: HubProcess) -> None:
    with running_job(quick_hub, "nora") as (_, job):
        slow = Command(quick_hub, job, "--", "sh", "-c", "echo first; cat /dev/zero | head -c 3 ; sleep 600")
        assert slow.process.stdout is not None
        assert slow.process.stdout.readline() == b"first\n", "it is there before the command has ended"
        slow.process.send_signal(signal.SIGINT)
        assert slow.ended()[0] == 130
        flood = "import sys\nfor n in range(3_000_000): sys.stdout.write(f'line {n}\\n')"
        status, out, err = Command(quick_hub, job, "--", "/usr/bin/python3", "-c", flood).ended()
        assert status == 0, err
        assert len(out) < 2 * 1024 * 1024
        assert out.startswith("line 0\n")
        assert "bytes of output are left out here" in out
        assert out.endswith("line 2999999\n")
        status, _, err = Command(quick_hub, "--timeout", "1", job, "--", "sleep", "600").ended()
        assert (status, "stopped after 1 s" in err) == (100, True)
        # Neither the one that was interrupted nor the late one is left.
        eventually(lambda: b"sleep\x00600" not in _all_commands())


def test_a_command_ends_with_its_job_and_is_refused_afterwards(quick_hub: HubProcess) -> None:
    with running_job(quick_hub, "mina") as (mina, job):
        stubborn = "trap '' TERM; echo begun; sleep 601"
        running = Command(quick_hub, job, "--", "sh", "-c", stubborn)
        assert running.process.stdout is not None
        assert running.process.stdout.readline() == b"begun\n"
        quick_hub.cancel(job)
        status, _, err = running.ended()
        assert status != 0
        eventually(lambda: b"sleep\x00601" not in _all_commands())
        eventually(lambda: not mina.children())
        status, _, err = Command(quick_hub, job, "--", "true").ended()
        assert (status, "is not running" in err) == (100, True)


def test_a_command_does_not_outlive_its_agent_and_the_job_does(quick_hub: HubProcess) -> None:
    program = (sys.executable, "-c", ARMED, "agent.exec.started")
    with running_job(quick_hub, "lena", program) as (lena, job):
        child = lena.child()
        running = Command(quick_hub, "--timeout", "600", job, "--", "sleep", "602")
        assert lena.end(0) == -9
        eventually(lambda: b"sleep\x00602" in _all_commands())
        lena.start()
        status, _, err = running.ended()
        assert (status, "restarted" in err) == (100, True), err
        eventually(lambda: b"sleep\x00602" not in _all_commands())
        assert is_alive(child)
        assert quick_hub.job(job).job.status == "running"
        assert Command(quick_hub, job, "--", "true").ended()[0] == 0
        assert [each["child"] for each in lena.children().values()] == [child]


def test_on_a_host_without_a_sandbox_it_ends_with_the_job_as_well(quick_hub: HubProcess, tmp_path: Path) -> None:
    with agent(quick_hub, tmp_path, "anna", grace_s="0"):
        job = quick_hub.submit("anna", "stepwise")
        quick_hub.says(job, "counting")
        running = Command(quick_hub, job, "--", sys.executable, "-c", DAEMON)
        assert running.process.stdout is not None
        assert running.process.stdout.readline() == b"left\n"
        quick_hub.cancel(job)
        assert running.ended()[0] != 0
        eventually(lambda: b"time.sleep(604)" not in _all_commands())


def test_the_specification_of_a_command_has_no_secret(quick_hub: HubProcess) -> None:
    with running_job(quick_hub, "ida") as (ida, job):
        running = Command(quick_hub, job, "--", "sh", "-c", "echo begun; sleep 605")
        assert running.process.stdout is not None
        assert running.process.stdout.readline() == b"begun\n"
        (request,) = (ida.state / "attempts").glob("*/exec-*/request.json")
        assert SECRET not in request.read_text()
        assert json.loads(request.read_text())["env"]["GREETING"] == "hello"
        assert request.stat().st_mode & 0o077 == 0
        running.process.send_signal(signal.SIGINT)
        running.ended()


def _all_commands() -> bytes:
    found = b""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += path.read_bytes() + b"\n"
        except OSError:
            continue
    # Not this person's own words, nor those of `strata exec`.
    return b"\n".join(line for line in found.split(b"\n") if b"strata\x00exec" not in line)
