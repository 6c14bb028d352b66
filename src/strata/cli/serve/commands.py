"""`strata serve CONFIG`: run a training server. `strata serve status`: show what one does."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from strata.base.errors import Code, StrataError
from strata.cli.gang.format import clock
from strata.cli.groups import DefaultGroup
from strata.cli.layout import console, print_once, render, to_json
from strata.cli.output import Format, output_option, print_error, printable, write
from strata.cli.serve.screen import line, screen
from strata.cli.training_server import connect_server, context_option, key_file_option
from strata.cli.watch import TRANSIENT, check_watched, is_live, live_screen, watch_flag

if TYPE_CHECKING:
    from strata.fleet.client.hub_client import HubClient
    from strata.train.settings import ServerSettings
    from strata.train.status.reports import ServerStatus

EVERY_S: Final = 1.0
ANSWER_S: Final = 15.0
NAME_A_SERVER: Final = (
    "one that you started yourself: strata serve status CONFIG; one of a hub: log in with a researcher's key "
    "(strata keys create), or see the hub's dashboard"
)


class Serve(DefaultGroup):
    """A first word that is no command is a settings file to run."""

    default = "run"


@click.group(cls=Serve, name="serve")
def serve() -> None:
    """Run a training server, which trains a model through an API.

    'strata serve CONFIG' is 'strata serve run CONFIG'; see 'strata serve run --help'.
    """


@serve.command()
@click.argument("config", type=click.Path(path_type=Path, dir_okay=False, exists=True), metavar="CONFIG")
@click.option("--make-keys", is_flag=True, help="Create the keys for links to ranks on other machines, and exit.")
def run(config: Path, *, make_keys: bool) -> None:
    """Run a training server, which trains a model through an API.

    CONFIG is a TOML file with the sections server, model, ranks, limits, sampling, snapshots, checkpoints and
    inference; every setting can also be set in the environment (STRATA_MODEL_PATH, …). The command starts the ranks,
    the orchestrator and the API servers, and restarts each when it dies. SIGTERM stops them in order. With ranks.mode =
    "connect" it attaches to ranks that were started elsewhere.
    """
    from strata.base import log
    from strata.base.settings import no_color
    from strata.cli.extras import require

    for module in ("zmq", "starlette"):
        require(module, extra="train")
    from strata.train.link.keys import make_first_keys
    from strata.train.settings import load_settings

    settings = load_settings(config)
    if make_keys:
        make_first_keys(settings.keys)
        return
    if settings.ranks.mode == "auto":
        require("torch", extra="train")
    style = settings.server.log_format or ("console" if sys.stderr.isatty() else "json")
    log.configure(style, settings.server.log_level, colour=log.colour_wanted(sys.stderr, no_color=no_color()))
    model, ranks = settings.model.base_model, _ranks(settings)
    # Before the imports of the launcher, which take seconds.
    print_error(f"strata serve: loading the model {model} on {ranks}; Ctrl-C stops it")
    from strata.train.launch.launcher import run_launcher

    def announce(address: str) -> None:
        for sentence in ready_sentences(settings, address):
            print_error(f"strata serve: {sentence}")

    run_launcher(settings, config, announce, api_module="strata.cli.serve.api_process")


def _ranks(settings: ServerSettings) -> str:
    from strata.cli.fleet.client import format_count

    return "ranks started elsewhere" if settings.ranks.mode == "connect" else format_count(settings.ranks.nproc, "rank")


def ready_sentences(settings: ServerSettings, address: str) -> list[str]:
    """Returns what a person needs to know of a server that is ready: its address first, where other programs look for
    it."""
    from strata.train.key_database import KEY_FILE

    server = settings.server
    key = "a key of the hub" if server.identity_database else f"the key in {settings.data / KEY_FILE}"
    sentences = [f"{address} is ready: model {settings.model.base_model}, {_ranks(settings)}"]
    if server.front_key is None:
        sentences.append(f"clients use {key}")
        if server.listen == "tcp":
            sentences.append(f"dashboard on {address}/; to log in: the same key")
    return sentences


@serve.command()
@click.argument("server", required=False, metavar="[URL|CONFIG]")
@watch_flag
@key_file_option
@context_option
@output_option
def status(*, server: str | None, watch: bool, key_file: Path | None, context: str | None, output: Format) -> None:
    """Show what a training server does, who waits for it, and what ended last.

    The server is the one at URL, or the one on this machine with the settings file CONFIG; default is the current
    context. With an operator's key all tenants are shown, with any other key its own tenant and the sum of the others.
    """
    if watch:
        check_watched(output)
    with connect_server(server, key_file, context, own="operator.token", timeout_s=ANSWER_S) as client:
        if watch:
            _follow(_poll(client), output)
        else:
            current = _fetch_status(client)
            print_once(current, screen(current, wide=output is Format.WIDE), output)


def _fetch_status(client: HubClient) -> ServerStatus:
    from strata.train.status.reports import ServerStatus

    try:
        return client.call("GET", "/api/v1/status", ServerStatus)
    except StrataError as error:
        if error.code not in (Code.NOT_FOUND, Code.FORBIDDEN):
            raise
        missing = "there is no training server at this address"
        message = missing if error.code is Code.NOT_FOUND else error.message
        raise StrataError(error.code, message, hint=NAME_A_SERVER) from error


def _poll(client: HubClient) -> Iterator[ServerStatus | StrataError]:
    """Poll for ever. The first call must succeed; later a server that is away may come back."""
    yield _fetch_status(client)
    while True:
        try:
            current: ServerStatus | StrataError = _fetch_status(client)
        except StrataError as error:
            if error.code not in TRANSIENT:
                raise
            current = error
        yield current


def _follow(statuses: Iterator[ServerStatus | StrataError], output: Format) -> None:
    if is_live(output):
        _live(statuses, wide=output is Format.WIDE)
    else:
        _print_changes(statuses, output)


def _print_changes(statuses: Iterator[ServerStatus | StrataError], output: Format) -> None:
    before, away = "", False
    for number, current in enumerate(statuses):
        time.sleep(EVERY_S if number else 0.0)
        if isinstance(current, StrataError):
            if not away:
                print_error(f"strata serve: lost the connection: {current.message}; trying again")
            away = True
            continue
        if away:
            print_error("strata serve: connected again")
        away = False
        text = to_json(current, indent=False) if output is Format.JSONL else line(current)
        if text != before:
            write(text if output is Format.JSONL else f"{_time(current)} {printable(text)}")
        before = text


def _live(statuses: Iterator[ServerStatus | StrataError], *, wide: bool) -> None:
    to = console()
    with live_screen() as live:
        for current in statuses:
            if isinstance(current, StrataError):
                live.lost(current.message)
            else:
                live.show(render(screen(current, wide=wide, rows=to.height - 1), to.width), _time(current))
            if live.ended_within(EVERY_S):
                return


def _time(current: ServerStatus) -> str:
    now_ms = int(current.now_s * 1000)
    return clock(now_ms, now_ms)
