"""The tools around what is to be changed: plan and run with manifests and files given as text, cancel and sample.

No tool reads a file of this machine: what a client sends is written into a temporary folder, and nothing of a manifest
may lead out of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.cli.fleet.apply import registered_trainers, send_manifest, upload_sources
from strata.cli.fleet.prepare import PreparedManifest, prepare_manifest
from strata.cli.mcp.tools import MAX_NAMES, JobArguments, Tool, job_row, named_job
from strata.cli.mcp.untrusted import Document
from strata.cli.output import print_error
from strata.fleet.artifacts.manifest import Word
from strata.fleet.artifacts.paths import check_collisions, check_path
from strata.fleet.client.hub_client import HubClient
from strata.fleet.core.manifest import parse_manifest
from strata.fleet.core.requirement import Needs
from strata.fleet.wire.base import Message, Reason
from strata.fleet.wire.jobs import CancelRequest, Job
from strata.fleet.wire.manifests import ManifestReply
from strata.sdk.bundle import make_bundle
from strata.sdk.datasets import resolve_data
from strata.sdk.submit import AUTO, NONE, RunOptions, run_request, send_job

MANIFEST: Final = "strata.toml"
SOURCE: Final = "strata mcp"
"""What the hub records as the file of such a manifest."""
MAX_FILES_BYTES: Final = 1 << 20
MAX_SAMPLE: Final = 65_536
"""Characters. A training server is a job, and may send any number."""
SAMPLE_S: Final = 600.0
"""How long a training server may take for a sample; the hub waits no longer."""
Files = Annotated[
    dict[str, str],
    msgspec.Meta(max_length=200, description="Source files by relative path, such as train.py; 1 MiB together."),
]
ManifestText = Annotated[
    str, msgspec.Meta(max_length=262_144, description="A manifest in TOML, as for `strata apply`; '' for none.")
]


class PlanArguments(Message, frozen=True, kw_only=True):
    manifest: ManifestText
    files: Files = msgspec.field(default_factory=dict)


class RunArguments(Message, frozen=True, kw_only=True):
    manifest: ManifestText = ""
    command: Annotated[
        tuple[str, ...],
        msgspec.Meta(max_length=100, description="Without a manifest: a command and its arguments, run beside files."),
    ] = ()
    files: Files = msgspec.field(default_factory=dict)
    name: Annotated[str, msgspec.Meta(max_length=64, description="Name of the job.")] = "run"
    project: Word = ""
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1, description="Another seed is another job.")] = 0
    environment: Annotated[
        str, msgspec.Meta(max_length=256, description="The one of files that lists packages; auto; none.")
    ] = AUTO
    cores: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 0
    gpus: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0
    ram_gib: Annotated[float, msgspec.Meta(ge=0, le=65_536)] = 0.0
    timeout_s: Annotated[float, msgspec.Meta(ge=0, le=31_536_000)] = 0.0
    retries: Annotated[int, msgspec.Meta(ge=0, le=10, description="After an error of its own.")] = 0


class CancelArguments(JobArguments, frozen=True, kw_only=True):
    reason: Reason = ""


class SampleArguments(Message, frozen=True, kw_only=True):
    model: Annotated[str, msgspec.Meta(min_length=1, max_length=1000, description="Base model, or tinker:// path.")]
    prompt: Annotated[str, msgspec.Meta(min_length=1, max_length=65_536)]
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=2048)] = 256
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] = 1.0


class _CompletionBody(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    prompt: str
    max_tokens: int
    temperature: float


class _Choice(msgspec.Struct, frozen=True):
    text: str
    finish_reason: str | None = None


class _Completion(msgspec.Struct, frozen=True):
    choices: tuple[_Choice, ...]


def plan(client: HubClient, arguments: PlanArguments) -> dict[str, Any]:
    return _apply(client, arguments.manifest, arguments.files, dry_run=True)


def run(client: HubClient, arguments: RunArguments) -> dict[str, Any]:
    if bool(arguments.manifest) == bool(arguments.command):
        raise StrataError(Code.INVALID, "give either a manifest or a command")
    if arguments.manifest:
        return _apply(client, arguments.manifest, arguments.files, dry_run=False)
    if not arguments.files:
        raise StrataError(Code.INVALID, "a command needs the files that it runs beside")
    if arguments.environment not in (AUTO, NONE):
        check_path(arguments.environment)
    with _written(arguments.files) as folder:
        bundle = make_bundle(folder)
        needs = Needs(min_cores=arguments.cores, min_gpus=arguments.gpus, min_ram_gib=arguments.ram_gib)
        options = RunOptions(
            name=arguments.name,
            seed=arguments.seed,
            needs=needs,
            environment=arguments.environment,
            retries=arguments.retries,
            timeout_s=arguments.timeout_s,
        )
        if arguments.project:
            options = replace(options, project=arguments.project)
        request = run_request(client, arguments.command, folder, bundle, options)
        reply = send_job(client, bundle, request)
    return job_row(reply.job) | {"new": reply.new}


def cancel(client: HubClient, arguments: CancelArguments) -> dict[str, Any]:
    job = named_job(client, arguments.job).job
    body = CancelRequest(reason=arguments.reason)
    return job_row(client.call("POST", f"/v1/job/{job.id}/cancel", Job, body=body))


def sample(client: HubClient, arguments: SampleArguments) -> dict[str, Any]:
    body = _CompletionBody(
        model=arguments.model,
        prompt=arguments.prompt,
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
    )
    reply = client.call("POST", "/v1/completions", _Completion, body=body, timeout_s=SAMPLE_S)
    if not reply.choices:
        raise StrataError(Code.UNAVAILABLE, "the training server replied without a text")
    choice = reply.choices[0]
    text = Document(choice.text[:MAX_SAMPLE])
    return {"model": arguments.model, "text": text, "finish_reason": choice.finish_reason}


def _apply(client: HubClient, text: str, files: Mapping[str, str], *, dry_run: bool) -> dict[str, Any]:
    with _written(files) as folder:
        prepared = _prepare(client, text, folder, dry_run=dry_run)
    options = {"accept": False, "retrain": False, "take_over": False}
    if not dry_run:
        upload_sources(client, prepared, registered_trainers(client))
    return _planned(send_manifest(client, prepared, options, dry_run=dry_run))


def _prepare(client: HubClient, text: str, folder: Path, *, dry_run: bool) -> PreparedManifest:
    path = folder / MANIFEST
    if path.exists():
        raise StrataError(Code.INVALID, f"the manifest itself is {MANIFEST}: call that file otherwise")
    for trainer in parse_manifest(text, MANIFEST).trainers.values():
        _check_inside(folder, trainer.params, trainer.name)
        # An absolute directory is one of the hosts, and is not read here.
        if not Path(trainer.directory).is_absolute():
            _check_inside(folder, trainer.directory, trainer.name)
    path.write_text(text, encoding="utf-8")
    prepared = prepare_manifest(
        path,
        lambda line: print_error(f"strata: {line}"),
        lambda sources: resolve_data(client, sources),
        describe=False,
        dry_run=dry_run,
    )
    return replace(prepared, manifest=msgspec.structs.replace(prepared.manifest, source=SOURCE))


def _check_inside(folder: Path, path: str, trainer: str) -> None:
    if not (folder / path).resolve().is_relative_to(folder.resolve()):
        raise StrataError(Code.INVALID, f"trainers.{trainer}: {path} is not among the files of this call")


@contextmanager
def _written(files: Mapping[str, str]) -> Iterator[Path]:
    """The files in a folder of their own, which goes at the end."""
    if sum(len(text.encode("utf-8", "surrogatepass")) for text in files.values()) > MAX_FILES_BYTES:
        raise StrataError(Code.INVALID, f"the files have more than {MAX_FILES_BYTES} bytes together")
    check_collisions([check_path(path) for path in files])
    with TemporaryDirectory(prefix="strata-mcp-") as temporary:
        folder = Path(temporary)
        for path, text in files.items():
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        yield folder


def _planned(reply: ManifestReply) -> dict[str, Any]:
    return {
        "applied": reply.applied,
        "summary": reply.summary,
        "project": reply.project,
        "new": [{"id": each.id, "name": each.label} for each in reply.new[:MAX_NAMES]],
        "changed": [{"id": each.id, "name": each.label, "kinds": each.kinds} for each in reply.changed[:MAX_NAMES]],
        "requeued": [{"id": each.id, "name": each.label} for each in reply.requeued[:MAX_NAMES]],
        "unchanged": reply.unchanged,
        "kept": reply.orphaned[:MAX_NAMES],
        "trainers": reply.trainers[:MAX_NAMES],
        "hosts": reply.hosts[:MAX_NAMES],
        "schedules": list(reply.schedules)[:MAX_NAMES],
        "stopped_sweeps": reply.stopped[:MAX_NAMES],
    }


PLANNING: Final = (
    Tool(
        name="plan",
        description="Show what a manifest would change at the hub. Changes nothing.",
        arguments=PlanArguments,
        run=plan,
    ),
)
WRITING: Final = (
    Tool(
        name="run",
        description="Queue the jobs of a manifest, or one command with its files as a job.",
        arguments=RunArguments,
        run=run,
        writes=True,
    ),
    Tool(name="cancel", description="Cancel a job.", arguments=CancelArguments, run=cancel, writes=True),
    Tool(
        name="sample",
        description="Continue a text with a model of a training server of the hub.",
        arguments=SampleArguments,
        run=sample,
        writes=True,
    ),
)
