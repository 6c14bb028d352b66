"""`strata data`: push, list, pull folders that jobs read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from strata.base.errors import Code, StrataError
from strata.cli.fleet.client import (
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
    from strata.fleet.wire.artifacts import ArtifactRecord

_LIST: Final = (
    Column("name", cut=40),
    Column("id"),
    Column("owner", cut=24),
    Column("size", number=True),
    Column("age", number=True),
    Column("by", wide=True),
)


@click.group(cls=VerbGroup)
def data() -> None:
    """Upload, download and list the data of jobs.

    A job gets data as a folder if it names it: 'strata run --data NAME', or NAME = "strata:NAME" under
    [trainers.x.data]. A host downloads it once.
    """


@data.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("name", required=False)
@hub_option
def push(folder: Path, name: str | None, context: str | None) -> None:
    """Upload FOLDER as NAME (default: the name of the folder). Only what the hub does not have is sent.

    NAME is yours from the first upload on: nobody else may upload under it. It stands for the newest upload. Jobs that
    are queued keep the one they were queued with.
    """
    with hub_client(context, timeout_s=120.0) as client:
        from strata.sdk.datasets import push_data

        label = name or folder.resolve().name
        with ProgressLine(f"uploading {label}", format_bytes) as report:
            pushed = push_data(client, folder, label, report)
    sent = f"{format_count(pushed.files, 'file')}, {format_bytes(pushed.size)}, {format_bytes(pushed.sent)} sent"
    print_error(f"strata: {label} is {short_id(pushed.artifact_id)} ({sent})")
    write(pushed.artifact_id)


def print_data(made: ArtifactRecord) -> None:
    """Print whose bytes a name stands for now."""
    print_error(f"strata: {made.lineage.model} is {short_id(made.artifact_id)} of {made.owner or 'an unknown owner'}")


@data.command()
@click.argument("name")
@click.argument("folder", type=click.Path(path_type=Path), required=False)
@hub_option
def pull(name: str, folder: Path | None, context: str | None) -> None:
    """Download the newest NAME into FOLDER (default: NAME), which must not exist yet."""
    target = folder or Path(name)
    if target.exists():
        raise StrataError(Code.CONFLICT, f"{target} exists already", hint="name another FOLDER")
    with hub_client(context, timeout_s=120.0) as client:
        from strata.fleet.client.hub_api import HubApi
        from strata.sdk.datasets import find_data, pull_artifact

        made = find_data(client, name)
        print_data(made)
        reply = HubApi(client).artifact(made.artifact_id)
        with ProgressLine(f"downloading {name}", format_bytes) as report:
            pull_artifact(client, reply, target, report)
    print_error(f"strata: {format_count(len(reply.manifest.files), 'file')}, {format_bytes(reply.size)}, in")
    write(str(target))


@data.command("ls")
@click.argument("name", default="")
@hub_view_options
def list_data(name: str, context: str | None, output: Format) -> None:
    """List uploads, newest first; with NAME only those of that name."""
    with hub_client(context) as client:
        from strata.fleet.wire.overview import StatusReply
        from strata.sdk.datasets import list_uploads

        now_s = client.call("GET", "/v1/status", StatusReply).now_s
        uploads = list_uploads(client, name)

    def row(made: ArtifactRecord) -> tuple[dict[str, Any], dict[str, Any]]:
        value = {"name": made.lineage.model, "id": made.artifact_id, "owner": made.owner or None, "size": made.size}
        value |= {"by": made.by or None}
        shown = {
            "id": short_id(made.artifact_id),
            "size": format_bytes(made.size),
            "age": format_duration(now_s - made.committed_at_s),
        }
        return value | {"committed_at_s": made.committed_at_s}, shown

    print_rows(output, _LIST, map(row, uploads))
