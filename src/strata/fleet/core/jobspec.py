"""The declarations of a job, a trainer and a host, with their fields, defaults and limits (priority, gang members,
projects, images, quiet hours, least idle time of a server), and the id of a job as a hash of what makes it.

The id of a job is `job1_` and the SHA-256 of the canonical JSON (RFC 8785) of model, mode, hyper, split_recipe,
train_hosts and seed, and of nothing else: the same manifest read again, or written in another order, is the same jobs.

- The order of keys and the spelling in the file (quotes, spaces, `1_000`, `1e3`) make no difference.
- JSON has one kind of number: `1` and `1.0` are the same, and so are `0.0` and `-0.0`. `true` is not `1`.
- `train_hosts` is a set: order and repetition make no difference. Every other list keeps its order.
- Code and data enter only where `retrain_on` asks for them, so that a new commit does not retrain everything.
- The trainer, priority, constraints and limits are how a job is done and not what it is: changing them keeps the id.
- A project other than `default` adds its name as one more field: two projects never share a job.
- A server adds its kind: it is another job than the training of a model of the same name.
- A run of a schedule adds when it was due: each run is a job, and two hubs that queue the same run queue one job.
- A member of a gang adds its index, the number of members, and how many workers each has.

A change of these rules needs a new version in the prefix. Ids are in databases, so the tests hold golden ones.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec

from strata.base.digest import digest, sha256_hex
from strata.base.errors import Code, StrataError
from strata.base.ids import content_id
from strata.fleet.core.lease import MAX_ATTEMPTS, MAX_INFRA, MAX_LOST, Budget
from strata.fleet.core.requirement import (
    Count,
    Gib,
    Label,
    LabelValue,
    Name,
    Needs,
    RequirementClass,
    SandboxLevel,
    Seconds,
    Slots,
    with_sandbox,
)

MAX_PRIORITY: Final = 1_000_000
MIN_IDLE_S: Final = 10.0
"""The least idle time of a server that sleeps: it takes about as long to stop, to save its state and to start again."""
MAX_MEMBERS: Final = 1024
"""The most members of one gang."""
MAX_WORKERS_PER_HOST: Final = 1024
DEFAULT_PROJECT: Final = "default"
"""The project of a manifest that names none, and of jobs that were submitted one by one."""
DATASET: Final = "strata:"
"""How a trainer names a dataset of the hub among its data."""
DAYS: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_DAY_MIN: Final = 24 * 60
_CLOCK: Final = re.compile(r"([0-9]{1,2}):([0-5][0-9])")

Priority = Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
Attempts = Annotated[int, msgspec.Meta(ge=1, le=1000)]
Seed = Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)]
Moment = Annotated[float, msgspec.Meta(ge=0, le=253_402_300_799)]
"""Seconds since 1970, until the year 9999."""
JobId = Annotated[str, msgspec.Meta(pattern=r"\Ajob1_[0-9a-f]{64}\Z")]
JobPattern = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Commit = Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{40}|[0-9a-f]{64})?\Z")]
Bundle = Annotated[str, msgspec.Meta(pattern=r"\A((sha256:)?[0-9a-f]{64}|artifact1_[0-9a-f]{64})?\Z")]
"""A file or an artifact that was uploaded. Hosts make names of files of it: it can be nothing else."""
SourcePath = Annotated[str, msgspec.Meta(max_length=256, pattern=r"\A(?!.*(^|/)\.\.?(/|$))[A-Za-z0-9_.][^\0\\\n]*\Z")]
"""A file below the source of a trainer."""
Image = Annotated[str, msgspec.Meta(max_length=512, pattern=r"\A([a-z0-9][A-Za-z0-9._/:@-]*)?\Z")]
TRANSPORTS: Final = (
    "atomic", "containers-storage", "dir", "docker", "docker-archive", "docker-daemon", "file", "ftp", "http", "https",
    "instance", "library", "oci", "oci-archive", "oras", "ostree", "shub", "sif", "ssh", "tarball",
)  # fmt: skip
"""What podman and apptainer take for another place than a registry, before the first colon."""
_IMAGE_REFERENCE: Final = re.compile(
    r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?(?::[0-9]{1,5})?/)?"
    r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@sha256:[0-9a-f]{64})?"
)
"""A name in a registry, as the OCI distribution specification has it; not a transport of podman or apptainer."""
PythonVersion = Annotated[str, msgspec.Meta(pattern=r"\A([0-9]{1,2}\.[0-9]{1,3}(\.[0-9]{1,3})?)?\Z")]
VariableName = Annotated[str, msgspec.Meta(max_length=256, pattern=r"\A[A-Za-z_][A-Za-z0-9_]*\Z")]
Members = Annotated[int, msgspec.Meta(ge=1, le=MAX_MEMBERS)]


class GangPlace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The place of a job in a gang: jobs that train together, each with its workers on one host."""

    name: Name
    """What the manifest calls the gang; its members are `NAME/0`, `NAME/1` and so on."""
    size: Members
    """How many members, and so hosts, it has."""
    index: Annotated[int, msgspec.Meta(ge=0, lt=MAX_MEMBERS)]
    min_size: Members
    """The least members: with fewer it waits; with more it trains on without those that are lost."""
    workers_per_host: Annotated[int, msgspec.Meta(ge=1, le=MAX_WORKERS_PER_HOST)] = 1
    run: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0
    """Counted up by the hub whenever the completed gang is to run again, so that it begins from nothing."""


class JobSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is stored of a job and handed to the host that claims it."""

    model: Name
    mode: Name = "default"
    hyper: dict[str, Any] = {}
    split_recipe: Any = None
    """A name or a table: how the data is divided; the trainer's business."""
    train_hosts: tuple[Text, ...] = ()
    """The hosts whose data is trained on, not where: that is `needs.allowed_hosts`."""
    seed: Seed = 0
    retrain_on: tuple[Literal["code", "data"], ...] = ()
    code: Text = ""
    """The digest of the trainer's source, if `retrain_on` has "code"."""
    data: Text = ""

    kind: Literal["train", "server"] = "train"
    """`train` ends with a result. `server` runs until it is cancelled and says where it serves."""
    project: Name = DEFAULT_PROJECT
    trainer: Name = "default"
    name: Text = ""
    """What the manifest calls it, for people and for `after`."""
    needs: Needs = Needs()
    priority: Priority = 0
    after: tuple[JobId, ...] = ()
    """Jobs that must be completed first."""
    max_attempts: Attempts = MAX_ATTEMPTS
    max_lost: Attempts = MAX_LOST
    max_infra: Attempts = MAX_INFRA
    """How many attempts may end because hosts could not do their part."""
    timeout_s: Seconds = 0.0
    """The time of one attempt. 0: as long as it takes."""
    not_before_s: Moment = 0.0
    """No host gets it before this time. 0: at once."""
    delay_s: Seconds = 0.0
    """No host gets it before so long after it was queued first."""
    sweep: Text = ""
    """The sweep that made this job."""
    due: Text = ""
    """When a run of a schedule was due, as in 2026-11-17T02:00Z."""
    idle_s: Seconds = 0.0
    """A server without a request for so long is put to sleep; the next request wakes it. 0: never, else 10 or more."""
    gang: GangPlace | None = None
    """None: it trains alone."""

    def __post_init__(self) -> None:
        for field in ("train_hosts", "retrain_on", "after"):
            msgspec.structs.force_setattr(self, field, tuple(sorted(set(getattr(self, field)))))

    @property
    def id(self) -> str:
        return job_id(self)

    @property
    def requirement(self) -> RequirementClass:
        return RequirementClass(self.model, self.mode, self.needs, self.gang is not None)

    @property
    def budget(self) -> Budget:
        return Budget(max_attempts=self.max_attempts, max_lost=self.max_lost, max_infra=self.max_infra)

    def with_sandbox(self, required: Mapping[str, SandboxLevel]) -> JobSpec:
        """Returns the job with at least the sandbox that the hub requires of its project."""
        return msgspec.structs.replace(self, needs=with_sandbox(self.needs, required, self.project))

    def starts_at_s(self, created_at_s: float) -> float:
        """Returns the time before which no host gets it; 0 for a job that may start at once."""
        return max(self.not_before_s, created_at_s + self.delay_s if self.delay_s else 0.0)

    @property
    def label(self) -> str:
        """Names the job for people: the manifest's name, or `model-mode`."""
        return self.name or f"{self.model}-{self.mode}"

    @property
    def declared_name(self) -> str:
        """The name that the manifest has for it: of a member of a gang, that of the gang."""
        return self.label if self.gang is None else self.gang.name


def job_id(spec: JobSpec) -> str:
    same = ("model", "mode", "hyper", "split_recipe", "train_hosts", "seed")
    what: dict[str, Any] = {name: getattr(spec, name) for name in same}
    for part, known in (("code", spec.code), ("data", spec.data)):
        if part in spec.retrain_on:
            if not known:
                raise StrataError(
                    Code.PRECONDITION,
                    f'{spec.label}: retrain_on has "{part}", but the digest of the {part} is not known',
                )
            what[part] = known
    if spec.project != DEFAULT_PROJECT:
        what["project"] = spec.project
    if spec.kind == "server":
        what["kind"] = spec.kind
    if spec.due:
        what["due"] = spec.due
    if spec.gang is not None:
        what["gang"] = {name: getattr(spec.gang, name) for name in ("index", "size", "workers_per_host")}
    return content_id("job", 1, what)


def gang_members(spec: JobSpec) -> tuple[JobSpec, ...]:
    """All members of the gang that this job belongs to, by index; a job that trains alone is its only member."""
    gang = spec.gang
    if gang is None:
        return (spec,)
    return tuple(
        msgspec.structs.replace(
            spec, name=member_name(gang.name, index), gang=msgspec.structs.replace(gang, index=index)
        )
        for index in range(gang.size)
    )


def gang_ids(job_id: str, spec: JobSpec) -> tuple[str, ...]:
    """The ids of these members."""
    return (job_id,) if spec.gang is None else tuple(member.id for member in gang_members(spec))


def member_name(gang: str, index: int) -> str:
    return f"{gang}/{index}"


def in_run(spec: JobSpec, run: int) -> JobSpec:
    """This member of a gang in another run of it; a job that trains alone has no runs."""
    return (
        spec if spec.gang is None else msgspec.structs.replace(spec, gang=msgspec.structs.replace(spec.gang, run=run))
    )


def coordinator_job(spec: JobSpec) -> str:
    """Returns what the coordinator calls the run of a gang: the same for all its members, and never the same for two
    runs.

    Not by the name of the gang, which a manifest may change while some of its members run.
    """
    assert spec.gang is not None
    first = msgspec.structs.replace(spec, gang=msgspec.structs.replace(spec.gang, index=0))
    unique = first.id.partition("_")[2][:12]
    return f"{spec.model}-{unique}" + (f"-{spec.gang.run + 1}" if spec.gang.run else "")


class DataSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    source: Text
    """`strata:NAME` for a dataset of the hub; else a path on the host or an address, the trainer's business."""
    digest: Text = ""
    """The artifact that the name of a dataset stood for when the trainer was declared."""

    @property
    def dataset(self) -> str:
        """The name of the dataset of the hub; empty for any other source."""
        return self.source.removeprefix(DATASET) if self.source.startswith(DATASET) else ""


class EnvironmentSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a job runs in: Python packages that its host installs with uv, once for each content, or an image."""

    image: Image = ""
    """An OCI image, in the place of `file`: the command runs in it, with podman or apptainer."""
    file: SourcePath = ""
    """A file in the trainer's source: `uv.lock` (with `pyproject.toml` beside it), `pyproject.toml`, or
    requirements."""
    python: PythonVersion = ""
    """Empty: the Python that the host uses for trainers."""
    extras: tuple[Name, ...] = ()
    """Extras of the project, for `uv.lock` and `pyproject.toml`."""
    groups: tuple[Name, ...] = ()
    """Dependency groups of the project, for `uv.lock` and `pyproject.toml`."""


class TrainerSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a job is run. Exactly one of `directory`, `git` and `bundle` says where the source comes from."""

    name: Name
    command: tuple[Text, ...]
    """Arguments, not a line for a shell."""
    directory: Text = ""
    """A directory that every host has."""
    git: Text = ""
    commit: Text = ""
    bundle: Text = ""
    """The digest of an uploaded source bundle."""
    interpreter: Text = ""
    """The Python of the trainer: a path, or empty for the agent's own. It is what is probed for torch and CUDA."""
    venv: Text = ""
    """A virtual environment; its Python is the interpreter."""
    environment: EnvironmentSpec | None = None
    """Packages that the host installs for this trainer, in the place of `interpreter` and `venv`."""
    env: dict[str, Text] = {}
    secrets: tuple[VariableName, ...] = ()
    """Secrets of the hub that the job gets as environment variables of these names."""
    data: dict[Label, DataSource] = {}
    params: Text = ""
    """The file with the JSON Schema of `hyper`, beside the manifest; or empty."""

    def encode(self) -> bytes:
        """Encodes the spec as the stores keep it: fields in the order above, tables by key. What is at its default is
        left out."""
        return _encode(self)

    @property
    def digest(self) -> str:
        """The identity of this trainer: a changed trainer is another one, and jobs name the one they are run with."""
        return f"trainer1_{sha256_hex(self.encode())}"

    def digests_for(self, retrain_on: Collection[str]) -> tuple[str, str]:
        """The digests of code and data that become part of a job's identity; empty if not asked for, or not known.

        A directory of the host may be anything tomorrow, so it has no digest.
        """
        code = (self.commit or self.bundle) if "code" in retrain_on else ""
        sources = {name: source.digest for name, source in self.data.items()} if "data" in retrain_on else {}
        return code, digest(sources) if sources and all(sources.values()) else ""


def qualified_trainer(project: str, name: str) -> str:
    """The name of a trainer among those of all projects; in the default project it is the plain name."""
    return name if project == DEFAULT_PROJECT else f"{project}/{name}"


def moved_start_s(before: JobSpec, after: JobSpec, created_at_s: float, not_before_s: float) -> float:
    """Returns the time before which no host gets a job that waits and whose start was changed: a back-off goes on."""
    starts_at_s = after.starts_at_s(created_at_s)
    is_backoff = not_before_s > before.starts_at_s(created_at_s)
    return max(starts_at_s, not_before_s) if is_backoff else starts_at_s


_encode: Final = msgspec.json.Encoder(order="deterministic").encode


class _Checked(msgspec.Struct, frozen=True, kw_only=True):
    """What hosts make names of files and variables of. Not in the type of the field: what is stored stays readable."""

    commit: Commit
    bundle: Bundle
    env: dict[VariableName, Text]


def check_trainer(trainer: TrainerSpec) -> None:
    """INVALID unless a host could run it."""
    sources = [name for name in ("directory", "git", "bundle") if getattr(trainer, name)]
    if len(sources) != 1 or not trainer.command:
        raise StrataError(Code.INVALID, "a trainer has a command and exactly one of directory, git and bundle")
    if bool(trainer.git) != bool(trainer.commit):
        raise StrataError(Code.INVALID, "git and commit belong together: a branch would be another code tomorrow")
    try:
        msgspec.convert({"commit": trainer.commit, "bundle": trainer.bundle, "env": dict(trainer.env)}, _Checked)
    except msgspec.ValidationError as error:
        raise StrataError(Code.INVALID, f"the trainer {trainer.name!r} cannot be run: {error}") from error
    _check_inputs(trainer)
    texts = (*trainer.command, *trainer.env.values(), trainer.directory, trainer.interpreter, trainer.venv)
    if any("\0" in text for text in texts):
        raise StrataError(Code.INVALID, f"the trainer {trainer.name!r} cannot be run: a NUL character is in it")


def image_problem(trainer: TrainerSpec) -> str:
    """Says why no host may run this trainer in its image; empty if one may, or if it has no image.

    Hosts ask as well: a hub may have stored the trainer before it knew this rule.
    """
    if trainer.environment is None or not trainer.environment.image:
        return ""
    image = trainer.environment.image
    if not _IMAGE_REFERENCE.fullmatch(image) or image.partition(":")[0] in TRANSPORTS:
        return f"{image!r} is not the name of an image in a registry, as in docker.io/library/python:3.12"
    if trainer.directory:
        return "an image and a directory of the host exclude each other: upload the source, or name a commit"
    return ""


def _check_inputs(trainer: TrainerSpec) -> None:
    """Packages or image, secrets and data."""
    environment = trainer.environment
    if environment is not None:
        if bool(environment.file) == bool(environment.image):
            raise StrataError(Code.INVALID, "environment has exactly one of file and image")
        if environment.image and (environment.python or environment.extras or environment.groups):
            raise StrataError(Code.INVALID, "environment: an image has no python, extras and groups")
        if problem := image_problem(trainer):
            raise StrataError(Code.INVALID, problem)
        if trainer.interpreter or trainer.venv:
            raise StrataError(Code.INVALID, "environment installs a Python of its own: leave interpreter and venv out")
    for name in trainer.secrets:
        if name.startswith("STRATA_") or name in trainer.env:
            raise StrataError(Code.INVALID, f"secrets: {name} is set by the agent or by env already")
    for label, source in trainer.data.items():
        if source.dataset and not source.digest.startswith("artifact1_"):
            raise StrataError(Code.INVALID, f"data: {label} names a dataset of the hub without its artifact")


class QuietHours(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Minutes of the day, on some days; an end before its start is on the day after."""

    days: tuple[Annotated[int, msgspec.Meta(ge=0, le=6)], ...]
    """0 is Monday."""
    start_min: Annotated[int, msgspec.Meta(ge=0, le=1439)]
    end_min: Annotated[int, msgspec.Meta(ge=0, le=1440)]

    @property
    def problem(self) -> str:
        """Says why these are no hours; empty if they are."""
        if not self.days or self.start_min in (self.end_min, _DAY_MIN):
            return "a window needs a day, and an end other than its start"
        return ""

    def covers(self, day: int, minute: int) -> bool:
        if self.start_min < self.end_min:
            return day in self.days and self.start_min <= minute < self.end_min
        return (day in self.days and minute >= self.start_min) or ((day - 1) % 7 in self.days and minute < self.end_min)

    def __str__(self) -> str:
        days = "" if len(self.days) == 7 else ",".join(DAYS[day] for day in self.days) + " "
        return f"{days}{_clock(self.start_min)}-{_clock(self.end_min)}"


def parse_quiet_hours(text: str) -> QuietHours | None:
    """`22:00-07:00`, or with days before it: `mon-fri 09:00-17:30`, `sat,sun 00:00-24:00`; None if it is neither."""
    words = text.lower().split()
    if len(words) not in (1, 2):
        return None
    days = _days(words[0]) if len(words) == 2 else tuple(range(7))
    start, _, end = words[-1].partition("-")
    start_min, end_min = _minute(start), _minute(end)
    if start_min is None or end_min is None:
        return None
    hours = QuietHours(days, start_min, end_min)
    return None if hours.problem else hours


def _days(text: str) -> tuple[int, ...]:
    days: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if first not in DAYS or (dash and last not in DAYS):
            return ()
        start = DAYS.index(first)
        length = (DAYS.index(last) - start) % 7 if dash else 0
        days.update((start + step) % 7 for step in range(length + 1))
    return tuple(sorted(days))


def _minute(text: str) -> int | None:
    clock = _CLOCK.fullmatch(text)
    minute = int(clock[1]) * 60 + int(clock[2]) if clock else _DAY_MIN + 1
    return minute if minute <= _DAY_MIN else None


def _clock(minute: int) -> str:
    return f"{minute // 60:02}:{minute % 60:02}"


class HostSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The operator's policy for one host. What is declared of its capability caps what its agent detects."""

    name: Name
    allow_jobs: tuple[JobPattern, ...] | None = None
    """Models, `model-mode` or globs of these. None: everything that is not denied; an empty list: nothing."""
    deny_jobs: tuple[JobPattern, ...] = ()
    slots: Slots | None = None
    """How many one-slot jobs run at once at most. None: as many as fit by their amounts."""
    quiet_hours: tuple[QuietHours, ...] = ()
    labels: dict[Label, LabelValue] = {}
    cuda: bool | None = None
    cores: Count | None = None
    ram_gib: Gib | None = None
    vram_gib: Gib | None = None


def find_cycle(after: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """A cycle of jobs, each of which comes after the next, with the first repeated at the end; empty if there is none.

    Depth first with a list instead of the call stack: a chain may be as long as the manifest.
    """
    done: set[str] = set()
    for start in after:
        path: list[str] = []
        on_path: set[str] = set()
        waiting = [(start, False)]
        while waiting:
            job, leaving = waiting.pop()
            if leaving:
                on_path.discard(path.pop())
                done.add(job)
            elif job in on_path:
                return (*path[path.index(job) :], job)
            elif job not in done:
                path.append(job)
                on_path.add(job)
                waiting.append((job, True))
                waiting += [(needed, False) for needed in after.get(job, ())]
    return ()
