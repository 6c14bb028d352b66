"""`strata weights`: list, export and import checkpoints and adapters (timeout 600 s)."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import click

from strata.cli.groups import VerbGroup
from strata.cli.output import Format, output_option, print_error, write
from strata.cli.progress import ProgressLine
from strata.cli.rows import Column, Rows
from strata.cli.training_server import connect_server, server_options

ANSWER_S: Final = 600.0
"""The server verifies and stores an adapter before it replies."""


@click.group(cls=VerbGroup)
def weights() -> None:
    """List or export checkpoints of a server, or import a LoRA adapter."""


@weights.command("list")
@output_option
@server_options
def list_(output: Format, **server: Any) -> None:
    """List your checkpoints on a training server, the newest first, and what they were trained with.

    'parent' is the checkpoint that training began with. Steps, datums and tokens are those since then; 'total tokens'
    has those of the parent too. 'sampled' are tokens that the client declared to be sampled. '-' is not known: an older
    version trained it.
    """
    from strata.cli.fleet.client import format_bytes
    from strata.sdk.checkpoints import list_checkpoints

    columns = (
        Column("checkpoint", identifies=True),
        Column("saved"),
        Column("size", number=True, wide=True),
        *(Column(name, number=True) for name in ("steps", "datums", "tokens")),
        *(Column(name, number=True, wide=True) for name in ("passes", "sampled", "total tokens")),
        Column("parent"),
    )
    with (
        connect_server(**server, timeout_s=ANSWER_S) as client,
        Rows(output, columns) as rows,
    ):
        for each in list_checkpoints(client):
            trained = each.provenance.trained
            rows.add(
                {
                    "checkpoint": each.tinker_path,
                    "saved": each.time.isoformat(timespec="seconds"),
                    "size": each.size_bytes if output.for_programs else format_bytes(each.size_bytes),
                    "steps": trained.steps,
                    "datums": trained.datums,
                    "tokens": trained.tokens,
                    "passes": trained.passes,
                    "sampled": trained.sampled_tokens,
                    "total tokens": each.provenance.total.tokens,
                    "parent": each.provenance.parent or "",
                }
            )


@weights.command()
@click.argument("checkpoint", metavar="CHECKPOINT")
@click.argument("out", type=click.Path(path_type=Path), metavar="OUT")
@click.option(
    "--format",
    "form",
    type=click.Choice(["peft", "hf"]),
    required=True,
    help="peft: a LoRA adapter. hf: a full model for Hugging Face.",
)
@click.option("--base", default="", metavar="MODEL", help="Folder of the base model to merge an adapter into.")
@server_options
def export(checkpoint: str, out: Path, form: Literal["peft", "hf"], base: str, **server: Any) -> None:
    """Export CHECKPOINT to the new folder OUT, after verifying it.

    CHECKPOINT is a path 'tinker://RUN/weights/NAME' of a running training server, or the folder of a checkpoint on
    disk, for which no server is needed. '--format hf' merges an adapter into its base model.
    """
    from strata.cli.extras import require

    if checkpoint.startswith("tinker://"):
        export_fetched(checkpoint, out, form, base, server)
        return
    if not Path(checkpoint).is_dir():
        raise click.BadParameter(f"there is no folder {checkpoint!r}", param_hint="CHECKPOINT")
    require("transformers", extra="train")
    from strata.train.runner.checkpoint.export import export as export_to

    manifest = export_to(Path(checkpoint), out, form, base)
    print_error(f"{manifest.model_id} after {manifest.steps} steps in {out}")


def export_fetched(path: str, out: Path, form: Literal["peft", "hf"], base: str, server: Mapping[str, Any]) -> None:
    from strata.cli.extras import require
    from strata.sdk.checkpoints import fetch_adapter, fetch_checkpoint

    if form == "hf":
        require("transformers", extra="train")
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    from strata.cli.fleet.client import format_bytes

    with (
        connect_server(**server, timeout_s=ANSWER_S) as client,
        ProgressLine(f"downloading {path}", format_bytes) as report,
    ):
        if form == "peft":
            fetch_adapter(client, path, out, report)
        else:
            from strata.train.runner.checkpoint.export import merge_fetched

            with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.absolute().parent) as folder:
                fetch_checkpoint(client, path, Path(folder), report)
                report.clear()
                merge_fetched(Path(folder), out, base)
    print_error(f"{path} in {out}")


@weights.command("import")
@click.argument("adapter", type=click.Path(path_type=Path, file_okay=False, exists=True), metavar="ADAPTER")
@click.option("--name", default="imported", show_default=True, metavar="NAME", help="Name of the checkpoint.")
@server_options
def import_(adapter: Path, name: str, **server: Any) -> None:
    """Import the PEFT adapter in the folder ADAPTER as a checkpoint of a running training server.

    It must be a LoRA adapter for the server's base model, in safetensors. Prints the path of the checkpoint, for
    load_state, create_training_client_from_state or create_sampling_client. The checkpoint belongs to the owner of the
    key. Importing the same adapter again gives the same checkpoint.
    """
    from strata.sdk.checkpoints import import_adapter

    with connect_server(**server, timeout_s=ANSWER_S) as client:
        write(import_adapter(client, adapter, name))
