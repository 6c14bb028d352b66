"""`strata train RECIPE`: options, starting a server of its own, and the lines that it prints about a run."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from strata.base.errors import Code, StrataError
from strata.base.settings import process_environment
from strata.cli.layout import console_width
from strata.cli.output import print_error, write
from strata.cli.plot import format_number, plot_lines
from strata.cli.progress import ProgressLine
from strata.cli.training_server import choose_server, context_option, is_settings_file, key_file_option

if TYPE_CHECKING:
    from strata.fleet.client.hub_client import HubClient
    from strata.sdk.fleet import ClientSettings
    from strata.sdk.recipes.connection import ServerConnection
    from strata.sdk.recipes.recipe import Recipe
    from strata.sdk.recipes.rendering import Renderer
    from strata.sdk.recipes.run_folder import MetricLine, RecipeRunRecord, RunFolder
    from strata.sdk.recipes.trainer import RecipeTrainer, RunPlace
    from strata.sdk.train import Model
    from strata.train.parallel import ParallelSettings

LINES: Final = 20
"""Steps that are printed, beside evaluations."""
WIDEST: Final = 100
"""Columns of a plot."""
SETTINGS: Final = "server.toml"
LOG: Final = "server.log"


@click.command()
@click.argument("recipe", type=click.Path(path_type=Path, dir_okay=False, exists=True), metavar="RECIPE")
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Keep the run in DIR (default: output.folder of the recipe, or runs/NAME).",
)
@click.option(
    "--server",
    metavar="URL|CONFIG",
    help="Train on this server, by its URL or its settings file (default: train here, on no server).",
)
@key_file_option
@context_option
def train(recipe: Path, folder: Path | None, server: str | None, key_file: Path | None, context: str | None) -> None:
    """Train a model as RECIPE says, and export its adapter.

    RECIPE is a TOML or YAML file of the kind sft, dpo, grpo or distill; 'strata recipes show sft' prints one. Paths in
    it count from its folder. Without a server the command starts ranks that end with it, and listens on no port. The
    run folder holds everything: a run that was stopped or killed continues when the same command is given again, and
    ends with the same weights; 'strata serve' continues it too. A server of which the settings file is given, and that
    does not run, runs as long as the command.
    """
    from strata.cli.extras import require

    for module in ("httpx", "transformers"):
        require(module, extra="recipes")
    from strata.sdk.recipes.environment import open_environment
    from strata.sdk.recipes.prepare import OpenedParts, make_method, read_recipe_rows
    from strata.sdk.recipes.recipe import read_recipe
    from strata.sdk.recipes.run_folder import RunFolder
    from strata.sdk.recipes.tasks import require_tasks
    from strata.sdk.recipes.trainer import RecipeTrainer, RunPlace, begin_attempt, plan_steps

    wanted = read_recipe(recipe)
    run = RunFolder(folder or Path(wanted.output.folder or f"runs/{recipe.stem}"))
    base = recipe.absolute().parent
    require_tasks(wanted.eval, base)
    with run.locked(), ExitStack() as stack:
        environment = None if wanted.env is None else stack.enter_context(open_environment(wanted, base, run.path))
        rows = read_recipe_rows(wanted, base, _fetch_object, environment)
        record = run.open_run(rows.settings)
        if record.finished:
            _summarise(run, record)
            return
        if server is None and context is None and wanted.server.url:
            server = wanted.server.url
            key_file = key_file or (base / wanted.server.key_file if wanted.server.key_file else None)
        if is_settings_file(server, context):
            settings = _serve(stack, Path(server), process_environment(), run.path / LOG, key_file)
        elif server is not None or context is not None:
            settings = choose_server(server, key_file, context)
        else:
            settings = _own_server(stack, run, wanted, base)
        connection = _connect(stack, settings)
        place = RunPlace(
            folder=run,
            server=connection.server,
            files=connection.files,
            recipe_folder=base,
            base_model=wanted.model.name or connection.base_models[0],
        )
        record = begin_attempt(place, record)
        renderer = _renderer(place)
        teacher = _teacher(stack, wanted, place, renderer) if wanted.kind == "distill" else None
        if environment is not None:
            environment.serve(place.server)
        prepared = make_method(wanted, rows, renderer, place, OpenedParts(teacher, environment))
        record = plan_steps(place, wanted, prepared.method, prepared.left_out, record)
        for sentence in record.left_out:
            print_error(sentence)
        record = _train(RecipeTrainer(place, wanted, prepared.method, record), record)
    _summarise(run, record)


def _train(trainer: RecipeTrainer, record: RecipeRunRecord) -> RecipeRunRecord:
    if record.step:
        print_error(f"continuing after step {record.step} of {record.steps}")
    try:
        with ProgressLine("training") as progress:
            return trainer.run(_Shown(record.steps, progress).show)
    except KeyboardInterrupt:
        print_error("stopped; the same command continues this run")
        raise


class _Shown:
    """The lines of a run: all evaluations and some steps, and all steps in the line of the terminal."""

    def __init__(self, steps: int, progress: ProgressLine) -> None:
        self._steps = steps
        self._every = max(1, steps // LINES)
        self._progress = progress

    def show(self, line: MetricLine) -> None:
        text = _describe(line, self._steps)
        if (
            line.step % self._every == 0
            or line.step == self._steps
            or any(name.startswith("eval") for name in line.values)
        ):
            self._progress.clear()
            write(text)
        self._progress(line.step, self._steps, text)


def _describe(line: MetricLine, steps: int) -> str:
    values = "  ".join(f"{name} {format_number(round(value, 6))}" for name, value in line.values.items())
    return f"step {line.step:>{len(str(steps))}}/{steps}  {values}"


def _summarise(run: RunFolder, record: RecipeRunRecord) -> None:
    from strata.sdk.recipes.run_folder import SERVER

    lines = run.read_metrics()
    for name in ("loss", "reward", "kl"):
        points = [(line.step, line.values[name]) for line in lines if name in line.values]
        if points:
            xs, ys = zip(*points, strict=True)
            write(f"\n{name}, {format_number(round(ys[0], 4))} at first and {format_number(round(ys[-1], 4))} at last")
            write("\n".join(plot_lines(xs, ys, min(console_width(), WIDEST))))
            break
    write(f"\nfinished after step {record.step}: {record.finished}")
    for sentence in record.left_out:
        write(sentence)
    if record.best is not None:
        write(f"best       {format_number(round(record.best.value, 6))} after step {record.best.step}")
    write(f"adapter    {run.adapter}\nmetrics    {run.metrics}\ncheckpoint {record.exported}")
    if (settings := run.path / SERVER / SETTINGS).exists():
        write(f"server     {settings}")


def _connect(stack: ExitStack, settings: ClientSettings) -> ServerConnection:
    from strata.sdk.recipes.connection import open_connection

    return stack.enter_context(open_connection(settings))


def _own_server(stack: ExitStack, run: RunFolder, recipe: Recipe, base: Path) -> ClientSettings:
    from strata.sdk.recipes.run_folder import SERVER, TINY_MODEL

    model = recipe.model
    if not (model.path or model.tiny):
        raise StrataError(
            Code.INVALID,
            "the recipe names no model and no server",
            hint='model.path, model.tiny = "llama", or --server',
        )
    tiny = model.tiny and _tiny_model(run.path / TINY_MODEL, model.tiny, seed=0)
    path = tiny or model_path(model.path, base)
    return _start_server(stack, run.path / SERVER, path, recipe, recipe.parallel)


def model_path(path: str, base: Path) -> str:
    """A folder, which counts from that of the recipe, or an id at the Hugging Face hub as it is."""
    folder = base / Path(path).expanduser()
    is_id = not folder.is_dir() and path.count("/") == 1 and not path.startswith((".", "~", "/"))
    return path if is_id else str(folder)


def _start_server(
    stack: ExitStack, folder: Path, model: str, recipe: Recipe, parallel: ParallelSettings
) -> ClientSettings:
    """A server of this run alone. Its settings are written once: a run that continues has the same server."""
    import json
    import secrets

    from strata.base.atomic import write_file
    from strata.base.private import private_folder
    from strata.cli.extras import require
    from strata.cli.local_server import without_server_settings

    for module in ("torch", "zmq", "starlette"):
        require(module, extra="train")
    config = private_folder(folder) / SETTINGS
    if not config.exists():
        # Another folder in each attempt that begins anew: a server of the last one may be about to end.
        data = folder / f"data-{secrets.token_hex(4)}"
        sizes = {name: size for name in parallel.__struct_fields__ if (size := getattr(parallel, name)) is not None}
        mesh = "".join(f"{name} = {json.dumps(size)}\n" for name, size in sizes.items())
        # With one model in a pass nothing depends on what shares it, and a resumed run has the same numbers.
        own = recipe.server
        dtype = "" if own.dtype is None else f'dtype = "{own.dtype}"\n'
        sized = {"nproc": own.ranks, "threads": own.threads}
        ranks = "".join(f"{name} = {size}\n" for name, size in sized.items() if size is not None)
        text = f"""[server]
data = {json.dumps(str(data))}
port = 0

[model]
path = {json.dumps(model)}
{dtype}quantise = "{recipe.server.quantise}"
max_lora_rank = {max(64, recipe.model.rank)}

[ranks]
{ranks}
[parallel]
{mesh}
[limits]
pack_tenants = false
"""
        write_file(config, text.encode())
    return _serve(stack, config, without_server_settings(), folder / LOG)


def _serve(
    stack: ExitStack, config: Path, environment: Mapping[str, str], log_file: Path, key_file: Path | None = None
) -> ClientSettings:
    """The server with this settings file until the stack ends, or the one that runs with it."""
    from strata.base.unix_socket import format_unix_address
    from strata.cli.local_server import local_server
    from strata.sdk.fleet import client_settings

    with ProgressLine("starting the ranks") as progress:
        served = stack.enter_context(local_server(config, environment, log_file, progress.waiting))
    return client_settings(url=format_unix_address(served.api_socket), token_path=key_file or served.data / "api.key")


def _tiny_model(folder: Path, family: str, *, seed: int) -> str:
    """The folder of a small random model, made if it is not there."""
    from strata.cli.extras import require
    from strata.cli.local_server import run_own_command

    require("torch", extra="train")
    if not (folder / "config.json").exists():
        import shutil

        made = folder.with_name(f".{folder.name}.part")
        shutil.rmtree(made, ignore_errors=True)
        run_own_command("models", "tiny", str(made), "--family", family, "--seed", str(seed))
        made.rename(folder)
    return str(folder)


def _teacher(stack: ExitStack, recipe: Recipe, place: RunPlace, student: Renderer) -> Model:
    """Opens the teacher: on the student's server, on another one, or on one that the run starts for it."""
    from tempfile import TemporaryDirectory

    from strata.sdk.recipes.run_folder import TEACHER_SERVER, TINY_TEACHER
    from strata.sdk.recipes.trainer import checkpoint_of
    from strata.train.parallel import ParallelSettings

    teacher, folder, base = recipe.teacher, place.folder.path, place.recipe_folder
    server, files, base_model = place.server, place.files, place.base_model
    if teacher.url or teacher.path or teacher.tiny:
        if teacher.url:
            settings = choose_server(teacher.url, base / teacher.key_file if teacher.key_file else None)
        else:
            tiny = teacher.tiny and _tiny_model(folder / TINY_TEACHER, teacher.tiny, seed=teacher.tiny_seed)
            path = tiny or model_path(teacher.path, base)
            settings = _start_server(stack, folder / TEACHER_SERVER, path, recipe, ParallelSettings())
        connection = _connect(stack, settings)
        server, files = connection.server, connection.files
        base_model = connection.base_models[0]
        with TemporaryDirectory() as fetched:
            student.require_same_tokens(_load_renderer(files, base_model, Path(fetched) / "tokenizer"), "the teacher")
    if teacher.adapter:
        return server.load_model(checkpoint_of(files, teacher.adapter, base), optimizer=False)
    # An adapter that is never trained adds nothing: the base itself.
    return server.create_model(base_model, rank=1, seed=0)


def _renderer(place: RunPlace) -> Renderer:
    from strata.sdk.recipes.run_folder import TOKENIZER

    return _load_renderer(place.files, place.base_model, place.folder.path / TOKENIZER)


def _load_renderer(files: HubClient, base_model: str, folder: Path) -> Renderer:
    """Loads a renderer with the tokenizer of the server's model: from its files, which the folder keeps, or by its
    id."""
    from strata.sdk.checkpoints import fetch_tokenizer
    from strata.sdk.recipes.rendering import Renderer

    if not folder.exists():
        try:
            fetch_tokenizer(files, folder)
        except StrataError as error:
            if error.code is not Code.NOT_FOUND:
                raise
            return Renderer.load(base_model)
    return Renderer.load(folder)


def _fetch_object(path: str) -> bytes:
    from strata.coord.worker.stores import Stores

    with Stores().open(path) as source:
        return source.read(0, source.seen.size)
