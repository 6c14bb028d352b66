"""Settings of the agent, section `agent`: STRATA_AGENT_STATE, STRATA_AGENT_SLOTS and so on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from strata.fleet.core.requirement import Label, LabelValue

SECTION: Final = "agent"

Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Word = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9_]+\*?\Z")]


class AgentSettings(msgspec.Struct, frozen=True, kw_only=True):
    state: Path | None = None
    """What only the agent may read: credentials, attempts, logs. None: `~/.local/state/strata/agent`."""
    work: Path | None = None
    """Where jobs work. None: `work` beside the state."""
    slots: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    """How many jobs of one slot run at once; the policy of the host in the manifest should say the same."""
    labels: dict[Label, LabelValue] = {}
    interpreter: str = ""
    """The Python that is asked for torch and CUDA, and that runs trainers which name none. Empty: the agent's own."""
    source: Path | None = None
    """A checkout whose commit is told to the hub as this host's."""
    run_as: str = ""
    """The user jobs run as, if the agent is root. Empty: the agent's own, who can read the agent's credentials."""
    pass_env: tuple[Word, ...] = ()
    """Variables of the agent that jobs get beside the usual ones (`HTTP_PROXY`, `NCCL_*`)."""
    on_stop: Literal["preempt", "finish", "leave"] = "preempt"
    """At SIGTERM: end the jobs and give them back, wait until they are done, or leave them to the next agent."""
    grace_s: NotNegative = 30.0
    """Between SIGTERM and SIGKILL of a job."""
    yield_to_people: Literal["never", "claims", "jobs"] = "never"
    """While somebody else uses the GPU or is logged in: claim nothing, or also give back what runs."""
    min_free_gib: NotNegative = 2.0
    """With less room in the work folder nothing is claimed."""
    max_log_mib: Positive = 256.0
    """Of one attempt; what is beyond is left out, except for the end."""
    max_skew_s: Positive = 300.0
    """How far the clock may be off from the hub's: certificates are good for a day."""
    poll_s: Annotated[float, msgspec.Meta(gt=0, le=55)] = 25.0
    """How long a claim waits at the hub."""
    log_format: Literal["json", "console"] | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @property
    def state_folder(self) -> Path:
        return (self.state or Path("~/.local/state/strata/agent")).expanduser().absolute()

    @property
    def work_folder(self) -> Path:
        if self.work is None:
            return self.state_folder.with_name("work")
        return self.work.expanduser().absolute()
