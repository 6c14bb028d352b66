"""`strata serve` CONFIG, status and resolve: options, the sentences when a server is ready, timeout 15 s."""

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
from strata.cli.training_server import connect_server, context_option, key_file_option, server_options
from strata.cli.watch import live_rows, view_options

if TYPE_CHECKING:
    from strata.fleet.client.hub_client import HubClient
    from strata.train.settings import ServerSettings
    from strata.train.status.reports import ServerStatus

ANSWER_S: Final = 15.0
MAX_PORT: Final = 65_535
MODEL_SETTINGS: Final = "serve.toml"
"""A file in the data folder: the settings of a server that was started with the name of a model alone."""
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
@click.argument("config", metavar="CONFIG|MODEL", required=False)
@click.option("--make-keys", is_flag=True, help="Create the keys for links to ranks on other machines, and exit.")
@click.option("--join", metavar="IP:PORT", help="Have ranks of the server whose first host listens there.")
@click.option(
    "--invite", type=click.Path(path_type=Path), help="A copy of hosts.invite from that server's data folder."
)
@click.option(
    "--data", type=click.Path(path_type=Path), default=Path("strata-host"), help="Folder of a host that joins."
)
def run(config: str | None, *, make_keys: bool, join: str | None, invite: Path | None, data: Path) -> None:
    """Run a training server, which trains a model through an API.

    MODEL is a folder or an id in the Hugging Face cache, and everything else is left to defaults and devices. CONFIG is
    a TOML file with the sections server, model, ranks, limits, sampling, snapshots, checkpoints and
    inference; every setting can also be set in the environment (STRATA_MODEL_PATH, …). The command starts the ranks,
    the orchestrator and the API servers, and restarts each when it dies. SIGTERM stops them in order. With ranks.mode =
    "connect" it attaches to ranks that were started elsewhere.

    With hosts.listen other hosts may join: --join, instead of CONFIG, gives this host's cores or devices to the server
    there, which sends settings and model.
    """
    from strata.cli.extras import require

    _check_options(make_keys=make_keys, join=join, invite=invite)
    for module in ("zmq", "starlette"):
        require(module, extra="train")
    from strata.base.settings import process_environment
    from strata.train.families import support_of
    from strata.train.link.keys import make_first_keys
    from strata.train.plan.defaults import resolve_settings
    from strata.train.plan.devices import read_machine
    from strata.train.plan.model_files import find_model_files
    from strata.train.settings import load_settings

    if join is not None:
        require("torch", extra="train")
        _join(config, join, invite, data)
        return
    if config is None:
        raise click.UsageError("name a settings file or a model, or --join a server")
    file = _settings_file(config)
    settings = load_settings(file)
    if make_keys:
        make_first_keys(settings.keys)
        return
    if settings.ranks.mode == "auto":
        require("torch", extra="train")
    configure_log(settings.server.log_format, settings.server.log_level)
    machine = read_machine(process_environment())
    files = find_model_files(settings.model.path)
    resolution = resolve_settings(settings, machine, files)
    settings = resolution.settings
    model, ranks = settings.model.base_model, _ranks(settings)
    # Before the imports of the launcher, which take seconds.
    print_error(f"strata serve: loading the model {model} on {ranks}; Ctrl-C stops it")
    for sentence in resolution.sentences():
        print_error(f"strata serve: {sentence}")
    if files is not None and (sentence := support_of(str(files.config.get("model_type"))).row_sentence):
        print_error(f"strata serve: {sentence}")
    from strata.train.launch.launcher import run_launcher

    def announce(address: str) -> None:
        for sentence in ready_sentences(settings, address):
            print_error(f"strata serve: {sentence}")

    run_launcher(resolution, file, announce, api_module="strata.cli.serve.api_process")


def _check_options(*, make_keys: bool, join: str | None, invite: Path | None) -> None:
    if make_keys and join is not None:
        raise click.UsageError("--make-keys does not go with --join: the first host makes the keys of hosts that join")
    if invite is not None and join is None:
        raise click.UsageError("--invite goes with --join: a server with a CONFIG makes its own invite")


def _join(config: str | None, address: str, invite: Path | None, data: Path) -> None:
    if config is not None:
        raise click.UsageError("a host that joins gets its settings from the first one: CONFIG does not go with --join")
    if invite is None:
        raise click.UsageError("--join needs --invite: copy hosts.invite from the data folder of the first host")
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()) or not 1 <= int(port[:6]) <= MAX_PORT:
        raise click.UsageError(f"--join {address!r} is not IP:PORT, as hosts.listen of the first host is")
    from strata.train.launch.joined_host import run_joined_host

    configure_log(None, "info")
    print_error(f"strata serve: joining the server at {address}; Ctrl-C stops it")
    run_joined_host(address, invite, data, lambda sentence: print_error(f"strata serve: {sentence}"))


def _settings_file(named: str) -> Path:
    """Returns the settings file; for a model one that says nothing else, in the data folder of its server."""
    file = Path(named)
    if file.is_file():
        return file
    import json

    from strata.base.atomic import write_file
    from strata.base.private import private_folder
    from strata.train.hugging_face import find_folder
    from strata.train.settings import load_settings

    if find_folder(named) is None:
        raise click.BadParameter(
            f"{named!r} is no settings file, no folder of a model, and no id of a model that 'strata models pull' got",
            param_hint="CONFIG|MODEL",
        )
    path = str(file.absolute()) if file.is_dir() else named
    file = private_folder(load_settings(None, flags={"model.path": path}).data) / MODEL_SETTINGS
    content = f"[model]\npath = {json.dumps(path)}\n".encode()
    if file.exists() and file.read_bytes() != content:
        raise StrataError(
            Code.CONFLICT,
            f"{file} is of a server with another model",
            hint="run it in another folder, or set STRATA_SERVER_DATA",
        )
    write_file(file, content)
    return file


def _ranks(settings: ServerSettings) -> str:
    from strata.cli.fleet.client import format_count
    from strata.train.settings import count_ranks

    if settings.ranks.mode == "connect":
        return "ranks started elsewhere"
    ranks = format_count(count_ranks(settings), "rank")
    return f"{ranks} of {settings.hosts.count} hosts" if settings.hosts.listen else ranks


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


@serve.command()
@click.argument("model", metavar="MODEL")
@click.option("--accept", "action", flag_value="accept", help="Go on with the numbers of the replay.")
@click.option("--roll-back", "action", flag_value="roll_back", help="Load the last checkpoint from before the replay.")
@server_options
def resolve(*, model: str, action: str | None, server: str | None, key_file: Path | None, context: str | None) -> None:
    """Resume MODEL, which is stopped because its replay differed from the first run.

    With --accept it goes on with the weights of the replay. With --roll-back it loads its last checkpoint: results of
    operations after that are of weights that it no longer has. Either way refused operations stay refused; submit them
    again. A researcher resolves models of their own, an operator those of all.
    """
    from strata.train.wire.bodies import ResolveBody
    from strata.train.wire.replies import ResolvedReply

    if action is None:
        raise click.UsageError("choose --accept or --roll-back")
    body = ResolveBody(action="accept" if action == "accept" else "roll_back")
    with connect_server(server, key_file, context, own="operator.token", timeout_s=ANSWER_S) as client:
        reply = client.call("POST", f"/api/v1/training_runs/{model}/replay", ResolvedReply, body=body)
    words = "loads its last checkpoint" if reply.request_id else "goes on with the numbers of the replay"
    print_error(f"model {model} {words}")
