"""`strata up`: a hub, an agent and a coordinator of this machine in one process; options, refusals, and what it prints
when ready.

They are the same hub and agent that `strata hub` and `strata agent` run. They share one process, so that a kill leaves
no half: jobs continue under their supervisors, and the next `strata up` resumes them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from strata.base.errors import Code, StrataError
from strata.cli.options import configure_log
from strata.cli.output import print_error

if TYPE_CHECKING:
    from strata.base.clock import Clock
    from strata.coord.private import PrivateCoordinator
    from strata.fleet.agent.identity import Membership
    from strata.fleet.agent.settings import AgentSettings
    from strata.fleet.core.capability import Capability
    from strata.hub.compose import Hub
    from strata.hub.settings import HubSettings

CONTEXT: Final = "local"


@click.command()
@click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="Store all data in FOLDER (default ~/.local/share/strata).",
)
@click.option(
    "--listen",
    metavar="HOST:PORT",
    help="Listen on this loopback address (default 127.0.0.1:8443; port 0: any free one).",
)
@click.option(
    "--slots",
    type=click.IntRange(1, 1024),
    help="Run at most this many one-slot jobs at once (default: as many as fit).",
)
@click.option("--name", metavar="NAME", help="Name of this machine in the fleet (default: its host name).")
@click.option(
    "--interpreter", metavar="PYTHON", help="Run trainers that name no interpreter with PYTHON (default: this one)."
)
@click.option("-v", "--verbose", is_flag=True, help="Log what the hub and the agent do.")
def up(
    *,
    data: Path | None,
    listen: str | None,
    slots: int | None,
    name: str | None,
    interpreter: str | None,
    verbose: bool,
) -> None:
    """Run a hub and an agent on this machine, in one process.

    Jobs run as you and can read all of your files, so 'strata up' is for one person: it makes no keys for other people
    who submit jobs. For those use 'strata hub' and agents with run_as.

    FOLDER holds everything: a SQLite database, logs, artifacts, credentials. All other commands then use this hub.
    Ctrl-C stops both and returns running jobs to the queue, a second Ctrl-C stops at once; the next 'strata up'
    continues with the same data. For jobs with several workers it starts a coordinator, if the extra is installed.
    """
    import asyncio

    from strata.base.settings import load, process_environment
    from strata.base.unix_socket import is_listening
    from strata.cli.coordinator import OWN_COMMAND
    from strata.cli.extras import require

    require("uvicorn", extra="hub")
    require("uvloop", extra="hub")
    from strata.base.loopback import is_loopback_address
    from strata.fleet.agent import settings as agent_settings
    from strata.http import otel
    from strata.hub import settings as hub_settings
    from strata.hub.private_coordinator import private_coordinator
    from strata.sdk.fleet import client_settings

    folder = (data or client_settings().data).expanduser().absolute()
    # Other settings come from STRATA_HUB_… and STRATA_AGENT_…, as for 'strata hub' and 'strata agent'.
    hub = load(
        hub_settings.HubSettings,
        section=hub_settings.SECTION,
        file=None,
        flags={"data": str(folder / "hub"), "listen": listen},
    )
    agent = load(
        agent_settings.AgentSettings,
        section=agent_settings.SECTION,
        file=None,
        flags={
            "state": str(folder / "agent"),
            "work": str(folder / "work"),
            "slots": None if slots is None else str(slots),
            "interpreter": interpreter,
        },
    )
    agent = _for_one_person(agent, hub.data)
    if not is_loopback_address(hub.listen) or hub.tls.enabled:
        raise StrataError(
            Code.INVALID,
            "strata up serves this machine only",
            hint="for more machines: 'strata hub --tls', and 'strata join' on each",
        )
    if is_listening(hub.socket):
        raise StrataError(
            Code.CONFLICT,
            f"strata up is running already, with all data in {_shown(folder)}",
            hint="'strata status' shows it; to start a second one: --data FOLDER --listen 127.0.0.1:0",
        )
    configure_log(None, "info" if verbose else "warning")
    stop_traces = otel.configure("strata-up", process_environment())
    try:
        # Jobs of another user, or in a sandbox, could not write checkpoints into the folder of this user.
        shared = bool(agent.run_as) or agent.sandbox.mode != "off"
        root = "" if shared else str(folder / "checkpoints")
        with private_coordinator(hub, OWN_COMMAND, checkpoint_root=root) as (hub, coordinator):
            asyncio.run(_run(hub, agent, name, coordinator))
    finally:
        stop_traces()


def _for_one_person(settings: AgentSettings, hub_data: Path) -> AgentSettings:
    """Lets jobs run as their owner unless `run_as` is set; a sandbox that the owner asks for hides the hub's data
    too."""
    from msgspec.structs import replace

    sandbox = settings.sandbox
    mode = sandbox.mode or ("auto" if settings.run_as else "off")
    hidden = (*sandbox.hidden, str(hub_data.expanduser().absolute()))
    return replace(settings, sandbox=replace(sandbox, mode=mode, hidden=hidden))


async def _run(
    hub_settings: HubSettings,
    agent_settings: AgentSettings,
    name: str | None,
    coordinator: PrivateCoordinator | None,
) -> None:
    import asyncio

    from strata.base.clock import SystemClock
    from strata.base.settings import process_environment
    from strata.fleet.agent.probe import hostname
    from strata.fleet.agent.start import run_agent
    from strata.hub.compose import open_hub
    from strata.hub.server import listening, serve

    def ready(member: Membership, capability: Capability) -> None:
        _print_ready(agent_settings, member.name, capability)

    clock = SystemClock()
    stop = asyncio.Event()
    async with open_hub(hub_settings, clock, owner_only=not agent_settings.run_as) as hub:
        with listening(hub_settings) as listeners:
            await _enrol(hub, agent_settings.state_folder, listeners.address, name or hostname())
            _use_context(hub_settings, listeners.address)
            serving = asyncio.create_task(serve(hub, hub_settings, clock, listeners, stop))
            coordinating = asyncio.create_task(_coordinate(hub, coordinator, clock))
            try:
                print_error(f"strata up: hub on {listeners.url}, all data in {_shown(hub_settings.data.parent)}")
                print_error(f"strata up: dashboard on {listeners.url}/; to log in: strata dashboard")
                await _warn_about_keys(hub)
                await run_agent(agent_settings, process_environment(), ready, serving)
            finally:
                stop.set()
                await serving
                coordinating.cancel()
                await asyncio.wait([coordinating])
    print_error("strata up: stopped")


async def _coordinate(hub: Hub, coordinator: PrivateCoordinator | None, clock: Clock) -> None:
    """Start the coordinator when a host has got the first member of a gang, and keep it running."""
    if coordinator is None or hub.context.coordinator is None:
        return
    await hub.context.coordinator.needed.wait()
    print_error(f"strata up: coordinator of gangs on {coordinator.address}, its log in {_shown(coordinator.folder)}")
    await coordinator.keep(clock, lambda line: print_error(f"strata up: {line}"))


async def _enrol(hub: Hub, state: Path, url: str, name: str) -> None:
    """Create the host secret of this machine at the first start, and save the address, which may change each time."""
    from strata.base.secret import Secret, read_secret
    from strata.fleet.agent.identity import load_membership, save_local

    try:
        member = load_membership(state)
    except StrataError as error:
        if error.code is not Code.PRECONDITION:
            raise
        host, text = await hub.context.enrollment.add_local(name)
        save_local(state, url, host_id=host.id, name=host.name, secret=Secret(text))
        return
    if member.url != url:
        secret = read_secret(state / "identity" / "secret")
        save_local(state, url, host_id=member.host_id, name=member.name, secret=secret)


def _use_context(settings: HubSettings, url: str) -> None:
    from strata.hub.compose import TOKEN_FILE
    from strata.sdk.fleet import ClientContext, client_settings, read_contexts, save_context

    client = client_settings()
    token = "" if settings.operator_token else str(settings.files / TOKEN_FILE)
    before = read_contexts(client).current
    save_context(client, CONTEXT, ClientContext(url=url, token_file=token))
    if before not in ("", CONTEXT):
        print_error(f"strata up: all commands use this hub now; to switch back: strata contexts {before}")


async def _warn_about_keys(hub: Hub) -> None:
    """Warn about keys that can submit jobs: made with --owner, or while jobs ran as another user."""
    from strata.fleet.http.identities import FEIGNED

    if not hub.context.owner_only:
        return
    now_s = hub.context.clock.wall_s()
    keys = [
        f"{key.name} ({key.id})"
        for key in await hub.context.identity.keys()
        if key.role in FEIGNED and key.valid(now_s)
    ]
    if keys:
        print_error(
            f"strata up: the holders of these keys can submit jobs that run as you: {', '.join(keys)}",
            hint="strata keys revoke KEY",
        )


def _shown(folder: Path) -> str:
    home = Path.home()
    return f"~/{folder.relative_to(home)}" if folder.is_relative_to(home) else str(folder)


def _print_ready(settings: AgentSettings, name: str, capability: Capability) -> None:
    from strata.cli.fleet.client import format_bytes, format_count

    graphics = f", {format_count(len(capability.gpus), 'GPU')}" if capability.gpus else ""
    what = f"{format_count(capability.cores, 'core')}, {format_bytes(capability.ram_bytes)}{graphics}"
    slots = "" if settings.slots is None else f", {format_count(settings.slots, 'slot')}"
    print_error(f"strata up: this machine is the host {name} ({what}){slots}")
    print_error("strata up: ready. In another terminal: strata apply MANIFEST, strata status. Ctrl-C stops it.")
