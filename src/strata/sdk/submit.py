"""`submit`: sends a command and its folder as a job (`RunOptions` with defaults, detection of the environment), and
waits for its end.

import strata.sdk.submit as fleet

job = fleet.submit(["python", "train.py"], environment="auto", gpus=1)
ended = job.wait()
print(ended.status, job.log())
"""

from __future__ import annotations

import hashlib
import re
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

import msgspec

from strata.base.digest import canonical_json
from strata.base.errors import Code, StrataError
from strata.fleet.client.hub_client import HubClient
from strata.fleet.core.job import TERMINAL
from strata.fleet.core.jobspec import DEFAULT_PROJECT, EnvironmentSpec, JobSpec, TrainerSpec
from strata.fleet.core.lease import MAX_ATTEMPTS
from strata.fleet.core.manifest_tables import env_problem
from strata.fleet.core.requirement import NAME_RULE, Needs
from strata.fleet.core.schedule import StartTime, start_fields
from strata.fleet.wire.artifacts import CommitReply
from strata.fleet.wire.jobs import CancelRequest, Job, JobReply, SubmitReply, SubmitRequest
from strata.fleet.wire.streams import StreamQuery
from strata.sdk.bundle import Bundle, make_bundle
from strata.sdk.datasets import ReportData, named_data
from strata.sdk.fleet import client_settings, connect

AUTO: Final = "auto"
NONE: Final = "none"
_POLL_S: Final = 0.5
ENVIRONMENT_FILES: Final = ("uv.lock", "requirements.txt", "pyproject.toml")
"""Files that list packages; of several the first is taken."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a command runs as a job."""

    name: str = ""
    """Empty: the name of the folder."""
    project: str = DEFAULT_PROJECT
    seed: int = 0
    needs: Needs = field(default_factory=Needs)
    environment: str = AUTO
    """A file of the folder that lists packages; `auto`: the first of uv.lock, requirements.txt and pyproject.toml that
    is there; `none`: the Python of the host."""
    python: str = ""
    """The version of Python of the environment; empty: the one of the host."""
    image: str = ""
    """An OCI image to run in, in the place of an environment."""
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: Sequence[str] = ()
    """Names of secrets, which the job gets as environment variables."""
    data: Sequence[str] = ()
    """Names of datasets of the hub; the variable STRATA_DATA_NAME says where each is."""
    after: Sequence[str] = ()
    """Ids of jobs that must be completed first."""
    retries: int = MAX_ATTEMPTS - 1
    """How often it runs again after an error of its own. What a host did not do is tried again in any case."""
    timeout_s: float = 0.0
    priority: int = 0
    start: StartTime | None = None
    """The earliest time at which it starts, or how long after it was queued; None: when a host is free."""


class SubmittedJob:
    """A job at the hub."""

    def __init__(self, client: HubClient, job: Job, *, new: bool) -> None:
        self._client = client
        self.id = job.id
        self.new = new
        """Whether this call queued it; the same command in the same folder is the same job."""

    def refresh(self) -> JobReply:
        """The job as it is now, with its attempts."""
        return self._client.call("GET", f"/v1/job/{self.id}", JobReply)

    def wait(self, timeout_s: float | None = None) -> Job:
        """The job when it has ended; DEADLINE after `timeout_s`."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while (job := self.refresh().job).status not in TERMINAL:
            if until_s is not None and time.monotonic() >= until_s:
                raise StrataError(Code.DEADLINE, f"the job is {job.status} after {timeout_s} s")
            time.sleep(_POLL_S)
        return job

    def log(self) -> str:
        """The log of the last attempt."""
        query = StreamQuery(limit=4 << 20)
        return self._client.fetch(f"/v1/job/{self.id}/log", query=query).content.decode(errors="replace")

    def cancel(self, reason: str = "") -> Job:
        return self._client.call("POST", f"/v1/job/{self.id}/cancel", Job, body=CancelRequest(reason=reason))

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def submit(
    command: Sequence[str], folder: Path | str = ".", options: RunOptions | None = None, *, context: str | None = None
) -> SubmittedJob:
    """Upload the folder and queue the command as a job of the hub that `strata login` chose, or of `context`."""
    client = connect(client_settings(context=context), timeout_s=120.0)
    try:
        bundle = make_bundle(Path(folder))
        request = run_request(client, command, Path(folder), bundle, options or RunOptions())
        reply = send_job(client, bundle, request)
    except BaseException:
        client.close()
        raise
    return SubmittedJob(client, reply.job, new=reply.new)


def send_job(client: HubClient, bundle: Bundle, request: SubmitRequest) -> SubmitReply:
    client.send("PUT", f"/v1/source/{bundle.sha256}", bundle.content, CommitReply)
    return client.call("POST", "/v1/jobs", SubmitReply, body=request)


def run_request(
    client: HubClient,
    command: Sequence[str],
    folder: Path,
    bundle: Bundle,
    options: RunOptions,
    report: ReportData = lambda _: None,
) -> SubmitRequest:
    """`report` gets the data that the job will read."""
    environment = choose_environment(folder, options)
    for name in options.env:
        problem = env_problem(name)
        if problem:
            raise StrataError(Code.INVALID, f"{name}: {problem}")
    # What runs is part of what the trainer is, so it names the trainer, and the trainer's name is the job's mode.
    data = named_data(client, options.data, report)
    what: list[object] = [list(command), bundle.sha256]
    more = [environment, dict(options.env), list(options.secrets), data]
    if any(more):
        what.append(msgspec.to_builtins(more))
    how = hashlib.sha256(canonical_json(what)).hexdigest()[:12]
    trainer = TrainerSpec(
        name=f"run-{how}",
        command=tuple(command),
        bundle=bundle.sha256,
        environment=environment,
        env=dict(options.env),
        secrets=tuple(options.secrets),
        data=data,
    )
    label = job_name(options.name or folder.resolve().name)
    if options.name and label != options.name:
        raise StrataError(
            Code.INVALID, f"{options.name[:100]!r} cannot be the name of a job", hint=f"{NAME_RULE}, such as {label}"
        )
    spec = JobSpec(
        model=label,
        mode=trainer.name,
        trainer=trainer.name,
        name=label,
        seed=options.seed,
        project=options.project,
        needs=options.needs,
        after=tuple(options.after),
        max_attempts=options.retries + 1,
        timeout_s=options.timeout_s,
        priority=options.priority,
        **start_fields(options.start),
    )
    return SubmitRequest(spec=spec, trainer=trainer)


def choose_environment(folder: Path, options: RunOptions) -> EnvironmentSpec | None:
    """The environment of a job in this folder; INVALID if the file that the options name is not there."""
    if options.image:
        if options.environment not in (AUTO, NONE) or options.python:
            raise StrataError(Code.INVALID, "an image brings its own packages and Python: name no environment")
        return _checked({"image": options.image})
    if options.environment == NONE:
        if options.python:
            raise StrataError(Code.INVALID, "a version of Python needs an environment")
        return None
    file = detect_environment(folder) if options.environment == AUTO else options.environment
    if not file:
        if options.python:
            raise StrataError(
                Code.INVALID, "a version of Python needs an environment", hint=f"one of {', '.join(ENVIRONMENT_FILES)}"
            )
        return None
    if not (folder / file).is_file():
        raise StrataError(Code.INVALID, f"there is no file {file} in {folder}")
    return _checked({"file": file, "python": options.python})


def _checked(values: Mapping[str, str]) -> EnvironmentSpec:
    try:
        return msgspec.convert(values, EnvironmentSpec)
    except msgspec.ValidationError as error:
        raise StrataError(Code.INVALID, f"this cannot be an environment: {error}") from None


def detect_environment(folder: Path) -> str:
    """The first file in the folder that lists packages; empty if none does."""
    for file in ENVIRONMENT_FILES:
        if (folder / file).is_file() and (file != "pyproject.toml" or _lists_packages(folder / file)):
            return file
    return ""


def _lists_packages(project: Path) -> bool:
    try:
        return lists_packages(project.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def lists_packages(project: str) -> bool:
    """Says whether the text of a project file has dependencies: many of them only configure tools."""
    try:
        table = tomllib.loads(project).get("project", {})
    except (ValueError, RecursionError):
        return False
    return isinstance(table, dict) and bool(table.get("dependencies"))


def job_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:64] or "run"
