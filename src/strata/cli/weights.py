"""`strata weights`: checkpoints of the training server as files for others, and adapters of others as checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

import click

from strata.cli.output import complain, write
from strata.cli.training_server import connect_server, context_option, key_file_option

ANSWER_S: Final = 600.0
"""An adapter is sent, verified and brought to the disk before the server answers."""


@click.group()
def weights() -> None:
    """Export checkpoints of the training server, or import an adapter."""


@weights.command()
@click.argument("checkpoint", type=click.Path(path_type=Path, file_okay=False, exists=True), metavar="CHECKPOINT")
@click.argument("out", type=click.Path(path_type=Path), metavar="OUT")
@click.option(
    "--format",
    "form",
    type=click.Choice(["peft", "hf"]),
    required=True,
    help="An adapter for PEFT, or a whole model for Hugging Face.",
)
@click.option("--base", default="", metavar="MODEL", help="What to merge an adapter into, if it has moved.")
def export(checkpoint: Path, out: Path, form: Literal["peft", "hf"], base: str) -> None:
    """Make the folder OUT of the folder CHECKPOINT, after verifying it.

    With 'hf' an adapter is merged into its base. No server is needed, and one that runs is not disturbed.
    """
    from strata.cli.extras import require

    require("transformers", extra="train")
    from strata.train.runner.export import export as export_to

    manifest = export_to(checkpoint, out, form, base)
    complain(f"{manifest.model_id} after {manifest.steps} steps in {out}")


@weights.command("import")
@click.argument("adapter", type=click.Path(path_type=Path, file_okay=False, exists=True), metavar="ADAPTER")
@click.option("--name", default="imported", show_default=True, metavar="NAME", help="Of the checkpoint.")
@click.option(
    "--server",
    metavar="URL|CONFIG",
    help="The training server, or the settings of one that runs here; what 'strata login' chose unless set.",
)
@key_file_option
@context_option
def import_(adapter: Path, name: str, server: str | None, key_file: Path | None, context: str | None) -> None:
    """Make a checkpoint of the folder ADAPTER, which PEFT saved, on a training server that runs.

    It must be a LoRA adapter for the server's base model, in safetensors. What is printed is the path of the
    checkpoint, for load_state, create_training_client_from_state or create_sampling_client. It belongs to the owner of
    the key. The same again is the same checkpoint.
    """
    from strata.sdk.adapters import import_adapter

    with connect_server(server, key_file, context, own="api.key", timeout_s=ANSWER_S) as client:
        write(import_adapter(client, adapter, name))
