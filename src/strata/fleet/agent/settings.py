"""Settings of the agent, section `agent` (STRATA_AGENT_STATE, STRATA_AGENT_SLOTS …), with defaults: sandbox,
containers, grace 30 s, caches in GiB, log size, poll interval.
"""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from strata.base.settings import Secret
from strata.fleet.core.requirement import Label, LabelValue, Slots
from strata.fleet.core.schedule import parse_duration

SECTION: Final = "agent"

Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Word = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9_]+\*?\Z")]


class SandboxSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What confines the jobs of this host: `[agent.sandbox]`."""

    mode: Literal["auto", "required", "off"] | None = None
    """`auto`: the strongest that the host can do; `required`: namespaces, or the agent does not start; `off`: jobs run
    as the agent's user or as `run_as`, without limits. Unset: `auto`, and `off` for `strata up` without `run_as`."""
    memory_gib: NotNegative = 0.0
    """The most memory of one job with all its processes: the host gets no job that declares more. 0: what the job
    declared, and nine tenths of the host's memory if it declared nothing."""
    processes: Annotated[int, msgspec.Meta(ge=0)] = 16_384
    """Processes and threads of one job. 0: no limit."""
    disk_gib: NotNegative = 0.0
    """The largest folder of one attempt: its source, output, checkpoints, temporary files and home. 0: no limit."""
    network: Literal["host", "none", "allow"] = "host"
    """`none`: a job reaches itself only; `allow`: also the networks in `allow`, which needs root and nftables."""
    allow: tuple[str, ...] = ()
    """Addresses and networks, as in `10.1.0.0/16`; name resolution needs the address of the resolver. A metadata
    address of a cloud is reached only if it is named here, also with `host`."""
    readable: tuple[str, ...] = ()
    """Folders that jobs may read although they lie in a home or below /tmp."""
    writable: tuple[str, ...] = ()
    """Folders that jobs may write, such as a cache of models; all jobs of the host share them."""
    hidden: tuple[str, ...] = ()
    """More folders that jobs do not see."""


class ContainerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What runs jobs in OCI images: `[agent.containers]`."""

    program: Literal["podman", "apptainer"] | None = None
    """Unset: the one that is installed, podman first."""
    registries: tuple[str, ...] = ()
    """Where images may come from, as in `docker.io` and `10.1.2.3:5000`. Empty: any registry with a public name."""
    options: tuple[str, ...] = ()
    """Options of the runtime, before its command: `--runtime runc`, `--root`."""
    run_options: tuple[str, ...] = ()
    """Options of each container: `--ulimit nofile=1024:1024`."""


class EnvironmentSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the environments of jobs are built: `[agent.environments]`."""

    allow_builds: bool = False
    """Build packages from source also where that code is not confined as jobs are: without namespaces it runs as the
    jobs' user beside the jobs, and it has the network of the host where jobs have less."""


class AgentSettings(msgspec.Struct, frozen=True, kw_only=True):
    state: Path | None = None
    """Folder with credentials, attempts and logs, readable by the agent only. Unset: `~/.local/state/strata/agent`."""
    work: Path | None = None
    """Folder in which jobs run. Unset: `work` beside the state folder."""
    slots: Slots | None = None
    """How many one-slot jobs run at once at most; the host's policy can lower it. Unset: as many as fit by amounts."""
    labels: dict[Label, LabelValue] = {}
    """Labels of this host, for `prefer_labels` and `require_labels` of jobs."""
    interpreter: str = ""
    """The Python that runs trainers which name none, and is queried for torch and CUDA. Empty: the agent's own."""
    source: Path | None = None
    """A checkout whose commit is reported to the hub as this host's."""
    run_as: str = ""
    """The user whom jobs run as, if the agent is root. Empty: `strata-job` or `nobody`; for an agent that is not root,
    and with `sandbox.mode = "off"`, the agent's own."""
    sandbox: SandboxSettings = SandboxSettings()
    containers: ContainerSettings = ContainerSettings()
    environments: EnvironmentSettings = EnvironmentSettings()
    pass_env: tuple[Word, ...] = ()
    """More variables of the agent that jobs inherit (`HTTP_PROXY`, `NCCL_*`)."""
    on_stop: Literal["preempt", "finish", "leave"] = "preempt"
    """What SIGTERM does: preempt the jobs, wait until they have finished, or leave them to the next agent."""
    until: Annotated[str, msgspec.Meta(pattern=r"\A(@[0-9]{1,12}|[0-9]{1,9}[smhd]?)?\Z")] = ""
    """When the agent stops by itself, as SIGTERM would: `90s`, `30m`, `2h` or `7d` after its start, or `@` and seconds
    since 1970. Empty: never."""
    grace_s: NotNegative = 30.0
    """Seconds between SIGTERM and SIGKILL of a job."""
    yield_to_people: Literal["never", "claims", "jobs"] = "never"
    """While a person is logged in or another program uses a GPU: claim nothing, or also preempt running jobs."""
    min_free_gib: NotNegative = 2.0
    """Free space in the work folder below which nothing is claimed."""
    environments_gib: NotNegative = 50.0
    """Size of all environments beyond which the least recently used are removed; never one that a job uses."""
    data_gib: NotNegative = 100.0
    """Size of all datasets beyond which the least recently used are removed from this host; never one that a job
    uses."""
    max_log_mib: Positive = 256.0
    """Limit of the log of one attempt; the middle of a longer log is left out, its end is kept."""
    poll_s: Annotated[float, msgspec.Meta(gt=0, le=55)] = 25.0
    """Seconds that a claim waits at the hub for a job."""
    advertise: Annotated[str, msgspec.Meta(pattern=r"\A[0-9A-Za-z.:-]*\Z")] = ""
    """The address of this host at which a hub on another machine reaches its servers, with TLS. Empty: the one that the
    host reaches the hub from."""
    metrics_listen: str = ""
    """HOST:PORT of `GET /metrics` for Prometheus, on loopback; empty: there is none."""
    metrics_token: Secret | None = None
    """What it takes as the bearer token. Unset: the one in `metrics.token` of the state folder, which is made then."""
    log_format: Literal["json", "console"] | None = None
    """Unset: console on a terminal, JSON elsewhere."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least level that is logged."""

    def stop_at_s(self, now_s: float) -> float:
        """Returns when `until` ends an agent that starts now."""
        if self.until.startswith("@"):
            return float(self.until[1:])
        duration = parse_duration(self.until)
        return inf if duration is None else now_s + duration.total_seconds()

    @property
    def state_folder(self) -> Path:
        return (self.state or Path("~/.local/state/strata/agent")).expanduser().absolute()

    @property
    def work_folder(self) -> Path:
        if self.work is None:
            return self.state_folder.with_name("work")
        return self.work.expanduser().absolute()
