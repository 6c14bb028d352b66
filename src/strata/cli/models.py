"""`strata models`: create models that the training server can load, and fetch the tokenizer of its model."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from strata.cli.output import print_error
from strata.cli.training_server import connect_server, context_option, key_file_option, server_option

ANSWER_S: Final = 60.0


@click.group()
def models() -> None:
    """Create models for the training server, or fetch its tokenizer."""


@models.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), metavar="DIR")
@click.option(
    "--family",
    type=click.Choice(["llama", "qwen3", "qwen3_moe"]),
    default="llama",
    show_default=True,
    help="Architecture of the model.",
)
@click.option("--layers", type=int, default=2, show_default=True, help="Number of layers.")
@click.option("--hidden", type=int, default=64, show_default=True, help="Hidden size; a multiple of 32.")
@click.option(
    "--vocab", type=int, default=512, show_default=True, help="Size of the vocabulary in tokens; at least 260."
)
@click.option("--context", type=int, default=2048, show_default=True, help="Longest sequence in tokens.")
@click.option("--experts", type=int, default=4, show_default=True, help="Number of experts (qwen3_moe only).")
@click.option("--seed", type=int, default=0, show_default=True, help="Random seed of the weights.")
def tiny(folder: Path, family: str, layers: int, hidden: int, vocab: int, **more: int) -> None:
    """Create a small random model with a tokenizer in DIR, for tests and first steps.

    The model is untrained. Nothing is downloaded, and the same options create the same files.
    """
    import msgspec

    from strata.cli.extras import require

    require("transformers", extra="train")
    from strata.train.runner.model.tiny import TinyModel, make

    shape = {"family": family, "layers": layers, "hidden": hidden, "vocabulary": vocab, **more}
    parameters = make(folder, msgspec.convert(shape, TinyModel))
    print_error(f"{family} with {parameters:,} parameters in {folder}")


@models.command()
@click.argument("out", type=click.Path(path_type=Path), metavar="OUT")
@server_option
@key_file_option
@context_option
def tokenizer(out: Path, server: str | None, key_file: Path | None, context: str | None) -> None:
    """Fetch the tokenizer of a training server's model into the new folder OUT.

    Load it with AutoTokenizer.from_pretrained(OUT).
    """
    from strata.sdk.checkpoints import fetch_tokenizer

    with connect_server(server, key_file, context, own="api.key", timeout_s=ANSWER_S) as client:
        names = fetch_tokenizer(client, out)
    print_error(f"{', '.join(names)} in {out}")
