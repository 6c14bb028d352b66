"""`strata artifacts`: list, download, remove; columns of the list."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from strata.base.errors import Code, StrataError
from strata.cli.completion import complete_jobs
from strata.cli.fleet.client import (
    find_job,
    format_bytes,
    format_count,
    format_duration,
    hub_client,
    hub_option,
    hub_view_options,
    print_rows,
    short_id,
)
from strata.cli.groups import VerbGroup
from strata.cli.output import Format, print_error, write
from strata.cli.progress import ProgressLine
from strata.cli.rows import Column

if TYPE_CHECKING:
    from strata.fleet.client.hub_client import HubClient
    from strata.fleet.wire.artifacts import ArtifactRecord, ArtifactReply

_LIST: Final = (
    Column("id"),
    Column("kind"),
    Column("job", cut=26),
    Column("size", number=True),
    Column("age", number=True),
    Column("metrics", cut=38),
    Column("job_id", wide=True),
    Column("attempt", wide=True, number=True),
    Column("by", wide=True),
    Column("project", wide=True),
    Column("trainer", wide=True),
    Column("path", wide=True),
)


@click.group(cls=VerbGroup)
def artifacts() -> None:
    """List, download and remove the results and checkpoints of jobs."""


@artifacts.command("list")
@click.argument("job", required=False, shell_complete=complete_jobs)
@click.option("--model", default="", metavar="NAME", help="Show only artifacts of this model.")
@click.option(
    "--kind",
    type=click.Choice(["result", "checkpoint", "source", "data", "all"]),
    default="result",
    show_default=True,
    help="Show only artifacts of this kind.",
)
@click.option("--best", "metric", default="", metavar="METRIC", help="Sort by METRIC, highest value first.")
@click.option("--lowest", is_flag=True, help="With --best: lowest value first.")
@click.option(
    "--limit", type=click.IntRange(1, 1000), default=100, show_default=True, help="Show at most this many artifacts."
)
@hub_view_options
def list_artifacts(  # noqa: PLR0913 (the options of the command)
    *,
    job: str | None,
    model: str,
    kind: str,
    metric: str,
    lowest: bool,
    limit: int,
    context: str | None,
    output: Format,
) -> None:
    """List artifacts, newest first; with JOB only those of that job."""
    with hub_client(context) as client:
        from strata.fleet.artifacts.manifest import ArtifactKind
        from strata.fleet.wire.artifacts import ArtifactsQuery, ArtifactsReply
        from strata.fleet.wire.overview import StatusReply

        job_id = find_job(client, job).job.id if job else ""
        now_s = client.call("GET", "/v1/status", StatusReply).now_s
        query = ArtifactsQuery(
            model=model,
            kind=None if kind == "all" else ArtifactKind(kind),
            job_id=job_id,
            metric=metric,
            lowest=lowest,
            limit=limit,
        )
        reply = client.call("GET", "/v1/artifacts", ArtifactsReply, query=query)
    # Without --kind all rows are results, so the column is left out to make room for the metrics.
    columns = [column for column in _LIST if column.key != "kind" or kind != "result" or output is Format.WIDE]
    print_rows(output, columns, ((artifact_row(each), _shown(each, metric, now_s)) for each in reply.artifacts))
    if reply.next is not None:
        print_error(f"strata: showing the first {limit} artifacts; use --limit for more")


def artifact_row(made: ArtifactRecord) -> dict[str, Any]:
    """An artifact as programs read it."""
    lineage = made.lineage
    return {
        "id": made.artifact_id,
        "kind": lineage.kind,
        "model": lineage.model or None,
        "mode": lineage.mode or None,
        "job_id": lineage.job_id or None,
        "epoch": lineage.epoch or None,
        "host_id": lineage.host_id or None,
        "size": made.size,
        "metrics": dict(lineage.metrics),
        "code": lineage.code or None,
        "parents": list(lineage.parents),
        "pinned": made.pinned or None,
        "by": made.by or None,
        "owner": made.owner or None,
        "project": made.project or None,
        "trainer": made.trainer_digest or None,
        "committed_at_s": made.committed_at_s,
    }


def _shown(made: ArtifactRecord, metric: str, now_s: float) -> dict[str, Any]:
    lineage = made.lineage
    ordered = sorted(lineage.metrics.items(), key=lambda each: (each[0] != metric, each[0]))
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in ordered)
    name = f"{lineage.model}_{lineage.mode}" if lineage.mode else lineage.model
    digest = made.artifact_id.partition("_")[2]
    return {
        "id": short_id(made.artifact_id),
        "job": f"{lineage.model}-{lineage.mode}" if lineage.model else None,
        "size": format_bytes(made.size),
        "age": format_duration(now_s - made.committed_at_s),
        "metrics": metrics or None,
        "trainer": short_id(made.trainer_digest) if made.trainer_digest else None,
        "path": f"{name}/{digest}/bundle.tar.zst" if lineage.model else None,
    }


@artifacts.command()
@click.argument("artifact")
@click.argument("folder", type=click.Path(path_type=Path), required=False)
@hub_option
def get(artifact: str, folder: Path | None, context: str | None) -> None:
    """Download ARTIFACT into FOLDER and verify every byte.

    ARTIFACT is an id, a prefix of an id, or a completed job. FOLDER must not exist yet (default: named after the
    artifact).
    """
    with hub_client(context, timeout_s=120.0) as client:
        from strata.sdk.datasets import pull_artifact

        reply = _artifact(client, artifact)
        target = folder or Path(short_id(reply.id))
        if target.exists():
            raise StrataError(Code.CONFLICT, f"{target} exists already", hint="name another FOLDER")
        with ProgressLine(f"downloading {short_id(reply.id)}", format_bytes) as report:
            pull_artifact(client, reply, target, report)
    what = f"{format_count(len(reply.manifest.files), 'file')}, {format_bytes(reply.size)}"
    print_error(f"strata: {what}, downloaded and verified")
    write(str(target))


@artifacts.command()
@click.argument("wanted", nargs=-1, required=True, metavar="ARTIFACT...")
@hub_option
def remove(wanted: tuple[str, ...], context: str | None) -> None:
    """Remove the bytes of each ARTIFACT; where it came from stays known.

    ARTIFACT is an id, a prefix of an id, or a completed job. You may remove results, checkpoints and data of your own.
    """
    with hub_client(context) as client:
        for reply in [_artifact(client, text) for text in wanted]:
            client.call("DELETE", f"/v1/artifact/{reply.id}", type(None))
            print_error(f"strata: {short_id(reply.id)} is removed ({format_bytes(reply.size)})")


def _artifact(client: HubClient, text: str) -> ArtifactReply:
    import re

    from strata.fleet.client.hub_api import HubApi

    hub = HubApi(client)
    if re.fullmatch(r"[0-9a-z_]{1,80}", text):
        try:
            return hub.artifact(text)
        except StrataError as error:
            if error.code is not Code.NOT_FOUND:
                raise
    job = find_job(client, text).job
    if not job.artifact:
        raise StrataError(Code.NOT_FOUND, f"{job.spec.label} is {job.status} and has no artifact")
    return hub.artifact(job.artifact)
