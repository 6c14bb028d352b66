"""`strata serve CONFIG` and `strata serve status`: options, the sentences when a server is ready, timeout 15 s."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from strata.base.errors import Code, StrataError
from strata.cli.groups import DefaultGroup
from strata.cli.layout import print_once
from strata.cli.options import configure_log
from strata.cli.output import Format, print_error
from strata.cli.serve.screen import screen
from strata.cli.training_server import connect_server, context_option, key_file_option
from strata.cli.watch import live_rows, view_options

if TYPE_CHECKING:
    from strata.fleet.client.hub_client import HubClient
    from strata.train.settings import ServerSettings
    from strata.train.status.reports import ServerStatus

ANSWER_S: Final = 15.0
NAME_A_SERVER: Final = (
    "one that you started yourself: strata serve status CONFIG; one of a hub: log in with a researcher's key "
    "(strata keys create), or see the hub's dashboard"
)


@click.group(cls=DefaultGroup, default="run", name="serve")
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
    configure_log(settings.server.log_format, settings.server.log_level)
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
@key_file_option
@context_option
@view_options
def status(*, server: str | None, key_file: Path | None, context: str | None, output: Format) -> None:
    """Show what a training server does, who waits for it, and what ended last.

    The server is the one at URL, or the one on this machine with the settings file CONFIG; default is the current
    context. With an operator's key all tenants are shown, with any other key its own tenant and the sum of the others.
    """
    with connect_server(server, key_file, context, own="operator.token", timeout_s=ANSWER_S) as client:
        current = _fetch_status(client)
    print_once(current, screen(current, wide=output is Format.WIDE, rows=live_rows(output)), output)


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
