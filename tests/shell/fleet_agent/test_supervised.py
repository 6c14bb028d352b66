"""Children under their supervisor, with real processes: started once, watched, ended with all they started."""

from __future__ import annotations

import os
import pwd
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strata.base.atomic import write_json
from strata.base.file_lock import try_lock
from strata.base.private import private_folder
from strata.fleet.agent import supervised, supervisor
from strata.fleet.agent.attempt_folder import JobUser, find_job_user
from strata.fleet.agent.supervised import ChildExit, SupervisorLost, SupervisorSpec
from tests.shell.fleet_agent.waiting import eventually, is_alive

SLEEP = "import time; print('up', flush=True); time.sleep(300)"


class Trial:
    def __init__(self, folder: Path) -> None:
        self.folder = private_folder(folder / "attempt")
        self.cwd = folder / "cwd"
        self.cwd.mkdir()
        self._supervisor: Any = None

    def start(self, code: str, **more: Any) -> None:
        given: dict[str, Any] = {
            "command": [sys.executable, "-c", code],
            "cwd": str(self.cwd),
            "env": {"PATH": "/usr/bin:/bin"},
            "max_log_bytes": 1 << 20,
            "timeout_s": 0.0,
            "grace_s": 20.0,
        }
        supervised.write_spec(self.folder, SupervisorSpec(**(given | more)))
        self._supervisor = supervised.start_supervisor(self.folder)

    def look(self) -> supervised.ChildStatus:
        return supervised.read_status(self.folder, self._supervisor)

    def gone(self, within_s: float) -> int:
        """The status of the supervisor, when it has ended."""
        status: int = self._supervisor.wait(within_s)
        return status

    def log(self) -> str:
        path = self.folder / supervised.LOG
        return path.read_text(errors="replace") if path.exists() else ""

    def says(self, text: str) -> str:
        return eventually(lambda: self.log() if text in self.log() else None)

    def exit(self) -> ChildExit:
        seen = eventually(lambda: seen if isinstance(seen := self.look(), ChildExit | SupervisorLost) else None)
        assert isinstance(seen, ChildExit), seen
        self._supervisor.wait(10)
        return seen

    def pid(self) -> int:
        return eventually(lambda: seen.pid if isinstance(seen := self.look(), supervised.ChildRunning) else None)

    def close(self) -> None:
        if self._supervisor is not None and self._supervisor.poll() is None:
            supervised.request_stop(self.folder, 0.0)
            self._supervisor.wait(20)


@pytest.fixture
def trial(tmp_path: Path) -> Iterator[Trial]:
    made = Trial(tmp_path)
    yield made
    made.close()


def test_output_and_exit_code_are_kept(trial: Trial) -> None:
    trial.start("import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)")
    seen = trial.exit()
    assert (seen.started, seen.status, seen.stopped, seen.timed_out) == (True, 7, False, False)
    assert {"out", "err"} <= set(trial.log().split())
    assert seen.max_rss_bytes > 1 << 20


def test_the_signal_that_killed_a_child_is_known(trial: Trial) -> None:
    trial.start("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert trial.exit().status == -signal.SIGSEGV


def test_a_program_that_is_not_there_is_told_apart_from_one_that_failed(trial: Trial) -> None:
    trial.start("", command=["no-such-program"])
    seen = trial.exit()
    assert not seen.started
    assert "no-such-program" in seen.error


def test_a_child_that_heeds_sigterm_ends_in_its_own_way(trial: Trial) -> None:
    trial.start(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(0)))\n"
        "print('up', flush=True)\ntime.sleep(300)"
    )
    trial.says("up")
    supervised.request_stop(trial.folder, 20.0)
    seen = trial.exit()
    assert (seen.status, seen.stopped) == (0, True)
    assert "saved" in trial.log()


def test_a_child_that_ignores_sigterm_is_killed_after_the_grace_and_sooner_if_asked_again(trial: Trial) -> None:
    trial.start("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEP)
    trial.says("up")
    supervised.request_stop(trial.folder, 3600.0)
    assert isinstance(trial.look(), supervised.ChildRunning)
    supervised.request_stop(trial.folder, 0.0)
    seen = trial.exit()
    assert (seen.status, seen.stopped) == (-signal.SIGKILL, True)


def test_a_child_that_takes_too_long_is_ended(trial: Trial) -> None:
    trial.start(SLEEP, timeout_s=0.3)
    seen = trial.exit()
    assert (seen.timed_out, seen.stopped, seen.status) == (True, False, -signal.SIGTERM)


def test_a_supervisor_that_is_killed_takes_the_child_along_and_is_missed(trial: Trial) -> None:
    trial.start(SLEEP)
    trial.says("up")
    pid = trial.pid()
    pids = supervised.read_pids(trial.folder)
    assert pids is not None
    os.kill(pids.supervisor, signal.SIGKILL)
    eventually(lambda: isinstance(trial.look(), SupervisorLost))
    eventually(lambda: not is_alive(pid))


def test_a_number_that_is_somebody_elses_by_now_is_not_killed(trial: Trial) -> None:
    trial.start(
        "import signal, time\nsignal.signal(signal.SIGUSR1, lambda *_: print('still here', flush=True))\n"
        "print('up', flush=True)\nwhile True: time.sleep(1)"
    )
    trial.says("up")
    pid = trial.pid()
    pids = supervised.read_pids(trial.folder)
    assert pids is not None
    write_json(
        trial.folder / "pid.json",
        supervised.ProcessIds(supervisor=pids.supervisor, child=pid, child_started="another boot:1"),
    )
    supervised.kill_orphans(trial.folder)
    os.kill(pid, signal.SIGUSR1)
    trial.says("still here")
    write_json(trial.folder / "pid.json", pids)
    supervised.kill_orphans(trial.folder)
    eventually(lambda: not is_alive(pid))


def test_an_attempt_runs_once_however_many_supervisors_are_started(trial: Trial) -> None:
    trial.start("print('ran')")
    trial.exit()
    assert supervised.start_supervisor(trial.folder).wait(20) == 3
    assert trial.log().split() == ["ran"]


def test_a_supervisor_that_is_slow_is_not_lost_because_a_second_one_went_away(trial: Trial) -> None:
    """An agent that was killed just after it had started a supervisor is followed by one that starts another."""
    slow = try_lock(trial.folder / "supervisor.lock")
    assert slow is not None
    trial.start(SLEEP)
    assert trial.gone(20) == supervisor.ALREADY_SUPERVISED
    assert isinstance(trial.look(), supervised.ChildNotStarted)
    os.close(slow)
    assert isinstance(trial.look(), SupervisorLost)


def test_a_log_is_bounded_and_keeps_its_beginning_and_its_end(trial: Trial) -> None:
    trial.start(
        "import sys\nprint('first')\nfor n in range(200_000): print('line', n)\nprint('last')", max_log_bytes=1 << 16
    )
    seen = trial.exit()
    log = trial.log()
    assert log.startswith("first\n")
    assert log.endswith("last\n")
    assert f"{seen.left_out} bytes of output are left out" in log
    assert seen.left_out > 1 << 20
    assert len(log) < (1 << 16) + (1 << 18) + 100


def test_a_child_has_the_environment_that_was_made_for_it_and_nothing_else(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENT_CREDENTIAL", "hst-secret")
    trial.start(SLEEP, env={"PATH": "/usr/bin", "STRATA_JOB": "job1_x"})
    trial.says("up")
    pids = supervised.read_pids(trial.folder)
    assert pids is not None
    for pid in (pids.child, pids.supervisor):
        seen = dict(
            pair.split("=", 1) for pair in Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0") if pair
        )
        assert seen.keys() <= {"PATH", "STRATA_JOB", "LC_CTYPE"}
    assert "AGENT_CREDENTIAL" not in Path(f"/proc/{pids.child}/environ").read_text()


def test_a_child_is_in_a_session_of_its_own_with_signals_as_usual(trial: Trial) -> None:
    trial.start(
        "import os, signal\n"
        "print(os.getsid(0) == os.getpid(), signal.getsignal(signal.SIGINT) is signal.default_int_handler,"
        " signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, signal.getsignal(signal.SIGHUP) == signal.SIG_DFL)"
    )
    trial.exit()
    assert trial.log().split() == ["True"] * 4


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_job_that_runs_as_somebody_else_cannot_read_what_is_the_agents(trial: Trial) -> None:
    owner = find_job_user("nobody")
    assert isinstance(owner, JobUser)
    assert owner.uid == pwd.getpwnam("nobody").pw_uid
    for folder in [trial.cwd, *trial.cwd.parents][:3]:
        folder.chmod(0o755)
    os.chown(trial.cwd, owner.uid, owner.gid)
    secret = trial.folder / "secret"
    secret.write_text("hst-secret")
    code = (
        f"import os\nprint(os.getuid(), os.getgid(), os.getgroups())\n"
        f"open('written', 'w').close()\n"
        f"try:\n    open({str(secret)!r})\nexcept PermissionError:\n    print('refused')\n"
    )
    trial.start(code, command=["/usr/bin/python3", "-c", code], uid=owner.uid, gid=owner.gid, groups=owner.groups)
    assert trial.exit().status == 0, trial.log()
    assert trial.log().splitlines() == [f"{owner.uid} {owner.gid} {list(owner.groups)}", "refused"]
