"""`strata models`: tiny, pull, list, check, push, and the tokenizer of a server's model (timeout 60 s)."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Final, Literal

import click

from strata.cli.groups import VerbGroup
from strata.cli.output import Format, output_option, print_data, print_error, write
from strata.cli.rows import Column, Rows
from strata.cli.training_server import connect_server, server_options

ANSWER_S: Final = 60.0


@click.group(cls=VerbGroup)
def models() -> None:
    """Create, fetch, check and publish models for the training server."""


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
@server_options
def tokenizer(out: Path, **server: Any) -> None:
    """Fetch the tokenizer of a training server's model into the new folder OUT.

    Load it with AutoTokenizer.from_pretrained(OUT).
    """
    from strata.sdk.checkpoints import fetch_tokenizer

    with connect_server(**server, timeout_s=ANSWER_S) as client:
        names = fetch_tokenizer(client, out)
    print_error(f"{', '.join(names)} in {out}")


@models.command()
@click.argument("model", metavar="MODEL")
@click.option("--revision", metavar="REVISION", help="Branch, tag or commit; the newest commit unless set.")
@click.option("--to", "folder", type=click.Path(path_type=Path, file_okay=False), help="Folder instead of the cache.")
def pull(model: str, revision: str | None, folder: Path | None) -> None:
    """Fetch MODEL from the Hugging Face Hub into its cache.

    MODEL is an id such as 'Qwen/Qwen3-0.6B'; as 'model.path' of a server it needs no network after that. Weights in
    safetensors, configuration and tokenizer are fetched, and no code. Prints the folder.
    """
    _require_hub()
    from strata.train.hugging_face import pull as fetch

    write(str(fetch(model, revision, folder)))


@models.command("list")
@click.argument("folders", nargs=-1, type=click.Path(path_type=Path, file_okay=False, exists=True), metavar="[DIR]...")
@output_option
def list_(folders: tuple[Path, ...], output: Format) -> None:
    """List the models in the Hugging Face cache, and in each DIR.

    'supported' says whether the training server takes the model's family.
    """
    _require_hub()
    from strata.cli.fleet.client import format_bytes
    from strata.train.families import family_of, support_of
    from strata.train.hugging_face import list_cached, list_folder

    columns = (
        Column("model", identifies=True),
        Column("family"),
        Column("supported"),
        Column("size", number=True),
        Column("folder", wide=True),
    )
    with Rows(output, columns) as rows:
        for each in [*list_cached(), *(found for folder in folders for found in list_folder(folder))]:
            family = family_of(each.folder)
            size = each.size if output.for_programs else format_bytes(each.size)
            rows.add(
                {
                    "model": each.name,
                    "family": family,
                    "supported": support_of(family).support,
                    "size": size,
                    "folder": str(each.folder),
                }
            )


@models.command()
@click.argument("model", metavar="MODEL")
@click.option("--ranks", type=click.IntRange(1, 4096), help="Ranks, one on each device.  [default: by device]")
@output_option
def check(model: str, ranks: int | None, output: Format) -> None:
    """Check whether the training server can train MODEL, and the memory that it needs.

    MODEL is a folder or an id in the Hugging Face cache. Only the heads of its files are read. Settings are those that
    a server of this machine would choose. Memory is of each device: to start with, and with every adapter in use and a
    full KV cache. 'experimental' is a family that was equal to the unmodified model on CPUs, one document per row. Exit
    status 2 if its family is refused or unproven, or if its chat template renders one message only beyond the limits of
    a server.
    """
    _require_hub()
    import msgspec

    from strata.base.errors import Code, StrataError
    from strata.base.settings import process_environment
    from strata.train.plan.devices import read_machine
    from strata.train.plan.model_check import check_model_files

    report = check_model_files(model, read_machine(process_environment()), ranks)
    if output.for_programs:
        print_data({"name": model, **msgspec.to_builtins(report)}, output)
    else:
        _print_report(report, output)
    if report.support == "no":
        raise StrataError(Code.UNSUPPORTED, report.why)
    if report.support == "unproven":
        raise StrataError(Code.UNSUPPORTED, f"no test has trained it: {report.why}")
    _try_chat(model)


def _try_chat(model: str) -> None:
    """UNSUPPORTED if the chat template of the model needs more than a server lets it have."""
    from importlib.util import find_spec

    from strata.base.errors import Code, StrataError
    from strata.train.api.template_process import try_template
    from strata.train.hugging_face import find_folder

    folder = find_folder(model)
    if folder is None or find_spec("transformers") is None or (rendered := try_template(folder)) is None:
        return
    if rendered.over_limit:
        raise StrataError(Code.UNSUPPORTED, f"its chat template cannot be served: {rendered.error}")
    if rendered.error:
        print_error(f"its chat template rejects a chat of one message: {rendered.error}")


def _towers(report: Any) -> str:
    from strata.base.support import say_experimental

    towers = ", ".join(report.towers)
    if report.no_images:
        return f"it is trained on text alone, and its {towers} never: {report.no_images}"
    return say_experimental(f"passes take images, and its {towers} are never trained", "images")


def _print_report(report: Any, output: Format) -> None:
    from strata.cli.fleet.client import format_bytes
    from strata.train.plan.defaults import settings_lines

    proven = {"yes": "supported", "no": "refused"}.get(report.support, report.support)
    print_error(f"{report.family}: {proven}, {report.parameters:,} parameters")
    if report.lora:
        print_error(f"LoRA trains {report.lora}; built-in sampler: {report.sampler}")
    if report.rows:
        print_error(report.rows)
    if report.towers and report.support != "no":
        print_error(_towers(report))
    if report.support == "unproven":
        print_error(
            "no test has compared it with the unmodified model; 'strata serve' does when it starts, and refuses it if "
            "the two differ"
        )
    elif report.why and report.support != "no":
        print_error(report.why)
    if report.support != "no":
        for setting, text in report.groups.items():
            print_error(f"{setting}: {text}")
    for line in settings_lines(report.settings):
        print_error(line)
    columns = (
        Column("training"),
        Column("dtype"),
        Column("base"),
        Column("start", number=True),
        Column("full", number=True),
    )
    with Rows(output, columns) as rows:
        for need in report.memory:
            rows.add(
                {
                    "training": need.training,
                    "dtype": need.dtype,
                    "base": need.quantise or need.dtype,
                    "start": format_bytes(need.start_bytes),
                    "full": format_bytes(need.full_bytes),
                }
            )


@models.command()
@click.argument("source", metavar="SOURCE")
@click.argument("repository", metavar="REPOSITORY")
@click.option(
    "--format",
    "form",
    type=click.Choice(["peft", "hf"]),
    default="peft",
    show_default=True,
    help="What to make of a checkpoint: a LoRA adapter, or the full model.",
)
@click.option("--base", default="", metavar="MODEL", help="Folder of the base model to merge an adapter into.")
@click.option("--public", is_flag=True, help="Create the repository for everybody to see; else it is private.")
@click.option("-m", "--message", default="Upload with strata", show_default=True, help="Message of the commit.")
@server_options
def push(source: str, repository: str, form: Literal["peft", "hf"], base: str, **more: Any) -> None:
    """Publish SOURCE as REPOSITORY on the Hugging Face Hub.

    SOURCE is a folder with a LoRA adapter or a model, such as 'strata weights export' makes, or a path
    'tinker://RUN/weights/NAME' of a running training server. Prints the URL of the commit.
    """
    _require_hub()
    from strata.train.hugging_face import push as publish

    options = {"private": not more.pop("public"), "message": more.pop("message")}
    if not source.startswith("tinker://"):
        if not Path(source).is_dir():
            raise click.BadParameter(f"there is no folder {source!r}", param_hint="SOURCE")
        write(publish(Path(source), repository, **options))
        return
    from strata.cli.weights import export_fetched

    with tempfile.TemporaryDirectory(prefix="strata-push-") as folder:
        exported = Path(folder) / "export"
        export_fetched(source, exported, form, base, more)
        write(publish(exported, repository, **options))


def _require_hub() -> None:
    from strata.cli.extras import require

    require("huggingface_hub", extra="train")
