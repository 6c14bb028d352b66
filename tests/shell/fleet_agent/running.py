"""A real hub and real agents, as processes of the command line, and an operator who looks at both."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from strata.base.errors import StrataError
from strata.base.secret import Secret, read_secret
from strata.fleet.agent.identity import save_local
from strata.fleet.client.hub_client import HubClient
from strata.fleet.core.jobspec import JobSpec, TrainerSpec
from strata.fleet.core.requirement import Needs
from strata.fleet.records import JobAttempt
from strata.fleet.wire.artifacts import FileQuery
from strata.fleet.wire.hosts import HostsReply
from strata.fleet.wire.identities import LocalHostReply, LocalHostRequest
from strata.fleet.wire.jobs import CancelRequest, Job, JobReply, SubmitReply, SubmitRequest
from strata.fleet.wire.overview import HubHealth
from strata.fleet.wire.streams import StreamQuery
from tests.shell.fleet_agent.waiting import eventually
from tests.support.ports import port_of, reserve_port

STRATA: Final = str(Path(sys.executable).with_name("strata"))
TRAINER: Final = Path(__file__).with_name("trainer.py")
PLANTED: Final = "planted-credential-4711"
"""In the agent's environment, as a cloud credential would be."""


class HubProcess:
    """`strata hub` on a port that stays its own, so that it can be killed and started again."""

    def __init__(
        self,
        folder: Path,
        *,
        stale_after_s: float = 45.0,
        reserve_after_s: float = 60.0,
        database: str = "",
        tls: bool = False,
    ) -> None:
        self.data = folder / "hub"
        self._guard = reserve_port()
        listen = f"127.0.0.1:{port_of(self._guard)}"
        self.url = f"{'https' if tls else 'http'}://{listen}"
        self._options = ["--listen", listen, "--data", str(self.data)]
        self._options += ["--database", database] if database else []
        self._options += ["--tls", "--name", "127.0.0.1"] if tls else []
        self.address = f"unix:{self.data / 'hub.sock'}"
        self._said = (folder / "hub.log").open("ab")
        self._environ = dict(os.environ) | {  # noqa: TID251 - a process of its own
            "STRATA_HUB_STALE_AFTER_S": str(stale_after_s),
            "STRATA_HUB_RESERVE_AFTER_S": str(reserve_after_s),
            "STRATA_HUB_KEEP_FREE_BYTES": "0",
            "STRATA_HUB_DRAIN_S": "1",
        }
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(
            [STRATA, "hub", *self._options],
            env=self._environ,
            stderr=self._said,
            stdout=self._said,
        )
        eventually(self._answers, 60.0)
        self.operator = HubClient(self.address, bearer=read_secret(self.data / "operator.token"))

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.operator.close()
        self._process.send_signal(number)
        self._process.wait(30)

    def close(self) -> None:
        if self._process.poll() is None:
            self.kill(signal.SIGTERM)
        self._guard.close()
        self._said.close()

    def _answers(self) -> bool:
        assert self._process.poll() is None, "the hub ended"
        try:
            with HubClient(self.address) as anybody:
                anybody.call("GET", "/v1/health", HubHealth)
        except StrataError:
            return False
        return True

    def submit(
        self,
        host: str,
        act: str,
        *,
        seed: int = 0,
        timeout_s: float = 0.0,
        ram_gib: float = 0.0,
        priority: int = 0,
        **hyper: Any,
    ) -> str:
        """A job for this host alone, for the trainer that does what it is told."""
        return self.submit_with(
            TrainerSpec(name="told", command=("python", TRAINER.name), directory=str(TRAINER.parent)),
            JobSpec(
                model=act,
                seed=seed,
                # Who may run a job is not part of what it is: without the name two tests would share one.
                hyper={"act": act, "host": host, **hyper},
                trainer="told",
                needs=Needs(allowed_hosts=(host,), min_ram_gib=ram_gib),
                timeout_s=timeout_s,
                priority=priority,
            ),
        )

    def submit_with(self, trainer: TrainerSpec, spec: JobSpec) -> str:
        body = SubmitRequest(spec=spec, trainer=trainer)
        return self.operator.call("POST", "/v1/jobs", SubmitReply, body=body).job.id

    def online(self) -> set[str]:
        hosts = self.operator.call("GET", "/v1/workers", HostsReply).hosts
        return {each.name for each in hosts if each.presence == "online"}

    def job(self, job_id: str) -> JobReply:
        return self.operator.call("GET", f"/v1/job/{job_id}", JobReply)

    def until(self, job_id: str, *statuses: str, within_s: float = 60.0) -> JobReply:
        return eventually(lambda: seen if (seen := self.job(job_id)).job.status in statuses else None, within_s)

    def until_epoch(self, job_id: str, epoch: int) -> None:
        eventually(lambda: self.job(job_id).job.epoch == epoch)

    def until_tried(self, job_id: str, epoch: int = 1, within_s: float = 60.0) -> JobAttempt:
        """The attempt, when it has ended."""

        def ended() -> JobAttempt | None:
            found = [each for each in self.job(job_id).attempts if each.epoch == epoch and each.ended_at_s is not None]
            return found[0] if found else None

        return eventually(ended, within_s)

    def log(self, job_id: str, epoch: int = 0) -> str:
        query = StreamQuery(attempt=epoch, limit=4 * 1024 * 1024)
        return self.operator.fetch(f"/v1/job/{job_id}/log", query=query).content.decode()

    def says(self, job_id: str, text: str, epoch: int = 0, within_s: float = 60.0) -> str:
        return eventually(lambda: seen if text in (seen := self.log(job_id, epoch)) else None, within_s)

    def file(self, artifact: str, path: str) -> str:
        query = FileQuery(path=path)
        return self.operator.fetch(f"/v1/artifact/{artifact}/file", query=query).content.decode()

    def cancel(self, job_id: str) -> None:
        self.operator.call("POST", f"/v1/job/{job_id}/cancel", Job, body=CancelRequest(reason="enough"))


class AgentProcess:
    """`strata agent` of a host that was enrolled on loopback."""

    def __init__(
        self,
        hub: HubProcess,
        folder: Path,
        name: str,
        program: Sequence[str] = (STRATA,),
        *,
        variables: Mapping[str, str] | None = None,
        **settings: str,
    ) -> None:
        self._variables = variables or {}
        self.name = name
        self.folder = folder / name
        self.folder.mkdir()
        self.state, self.work = self.folder / "state", self.folder / "work"
        made = hub.operator.call("POST", "/v1/hosts/local", LocalHostReply, body=LocalHostRequest(name=name))
        self.secret = made.secret
        save_local(self.state, hub.address, host_id=made.host_id, name=name, secret=Secret(made.secret))
        self._settings: Mapping[str, str] = {
            "min_free_gib": "0",
            "poll_s": "5",
            "grace_s": "5",
            "log_format": "json",
            # Their trainers and what they wait for lie below /tmp, and their Python in the home of root.
            "sandbox_mode": "off",
        } | settings
        self.start(program)

    def start(self, program: Sequence[str] = (STRATA,), **settings: str) -> None:
        environ = dict(os.environ) | {  # noqa: TID251 - a process of its own
            "AWS_SECRET_ACCESS_KEY": PLANTED,
            "STRATA_AGENT_STATE": str(self.state),
            "STRATA_AGENT_WORK": str(self.work),
            **self._variables,
            **{f"STRATA_AGENT_{name.upper()}": value for name, value in (dict(self._settings) | settings).items()},
        }
        with (self.folder / "agent.log").open("ab") as said:
            self._process = subprocess.Popen([*program, "agent"], env=environ, stderr=said, stdout=said)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self, number: int = signal.SIGTERM, within_s: float = 60.0) -> int:
        if self._process.poll() is None:
            self.send(number)
        return self.ended(within_s)

    def ended(self, within_s: float = 60.0) -> int:
        return self._process.wait(within_s)

    def said(self) -> str:
        return (self.folder / "agent.log").read_text()

    def children(self) -> Mapping[str, Any]:
        """What the supervisors wrote about their processes, by attempt."""
        found = {}
        for path in (self.state / "attempts").glob("*/pid.json"):
            found[path.parent.name] = json.loads(path.read_text())
        return found

    def child(self) -> int:
        """The process of the only job, when it runs."""
        return int(eventually(lambda: next((each.get("child", 0) for each in self.children().values()), 0)))

    def close(self) -> None:
        """Also what a test left running: children outlive their agent on purpose."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(30)
        for each in self.children().values():
            for pid in (each.get("child"), each["supervisor"]):
                if pid and b"supervisor.py" in _command(each["supervisor"]):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@contextmanager
def agent(
    hub: HubProcess, folder: Path, name: str, program: Sequence[str] = (STRATA,), **more: Any
) -> Iterator[AgentProcess]:
    made = AgentProcess(hub, folder, name, program, **more)
    try:
        yield made
    finally:
        made.close()
