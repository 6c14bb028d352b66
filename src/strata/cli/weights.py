"""`strata weights`: checkpoints of the training server as files for others, and adapters of others as checkpoints."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import click

from strata.cli.output import print_error, write
from strata.cli.training_server import connect_server, context_option, key_file_option, server_option

ANSWER_S: Final = 600.0
"""An adapter is sent, verified and brought to the disk before the server answers."""


@click.group()
def weights() -> None:
    """Export checkpoints of the training server, or import an adapter."""


@weights.command()
@click.argument("checkpoint", metavar="CHECKPOINT")
@click.argument("out", type=click.Path(path_type=Path), metavar="OUT")
@click.option(
    "--format",
    "form",
    type=click.Choice(["peft", "hf"]),
    required=True,
    help="An adapter for PEFT, or a whole model for Hugging Face.",
)
@click.option("--base", default="", metavar="MODEL", help="The folder of the model to merge an adapter into.")
@server_option
@key_file_option
@context_option
def export(checkpoint: str, out: Path, form: Literal["peft", "hf"], base: str, **server: Any) -> None:
    """Make the folder OUT of CHECKPOINT, after verifying it.

    CHECKPOINT is a path 'tinker://RUN/weights/NAME' of a training server that runs, or the folder of a checkpoint on
    its disk, for which no server is needed. With 'hf' an adapter is merged into its base.
    """
    from strata.cli.extras import require

    if checkpoint.startswith("tinker://"):
        _export_fetched(checkpoint, out, form, base, server)
        return
    if not Path(checkpoint).is_dir():
        raise click.BadParameter(f"there is no folder {checkpoint!r}", param_hint="CHECKPOINT")
    require("transformers", extra="train")
    from strata.train.runner.checkpoint.export import export as export_to

    manifest = export_to(Path(checkpoint), out, form, base)
    print_error(f"{manifest.model_id} after {manifest.steps} steps in {out}")


def _export_fetched(path: str, out: Path, form: Literal["peft", "hf"], base: str, server: Mapping[str, Any]) -> None:
    from strata.cli.extras import require
    from strata.sdk.checkpoints import fetch_adapter, fetch_checkpoint

    if form == "hf":
        require("transformers", extra="train")
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    with connect_server(
        server["server"], server["key_file"], server["context"], own="api.key", timeout_s=ANSWER_S
    ) as client:
        if form == "peft":
            fetch_adapter(client, path, out)
        else:
            from strata.train.runner.checkpoint.export import merge_fetched

            with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.absolute().parent) as folder:
                fetch_checkpoint(client, path, Path(folder))
                merge_fetched(Path(folder), out, base)
    print_error(f"{path} in {out}")


@weights.command("import")
@click.argument("adapter", type=click.Path(path_type=Path, file_okay=False, exists=True), metavar="ADAPTER")
@click.option("--name", default="imported", show_default=True, metavar="NAME", help="Of the checkpoint.")
@server_option
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
