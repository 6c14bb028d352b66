"""`strata invite`, `join`, `leave`: options, what they print, and refusals (token on the command line, plain http)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from strata.base.errors import Code, StrataError
from strata.cli.fleet.client import format_duration, hub_client, hub_option
from strata.cli.output import Format, output_option, print_data, print_error, write

if TYPE_CHECKING:
    from strata.base.secret import Secret
    from strata.fleet.agent.settings import AgentSettings
    from strata.fleet.wire.identities import CertificateReply
    from strata.identity.tokens import JoinToken

TOKEN_VARIABLE: Final = "STRATA_JOIN_TOKEN"  # noqa: S105 - the name of a variable
JOINING: Final = "joining"
"""Folder with key and signing request of an unfinished join: with the same key, the same token yields the same host."""
_state: Final = click.option(
    "--state", metavar="FOLDER", help="The agent's state folder (default ~/.local/state/strata/agent)."
)


@click.command()
@click.option(
    "--name", default="", metavar="NAME", help="Accept only a host of this name (default: the host chooses one)."
)
@click.option("--pool", default="", metavar="NAME", help="Put the host into this pool: it runs only jobs that name it.")
@click.option("--label", "labels", multiple=True, metavar="LABEL", help="Give the host this label; repeatable.")
@click.option("--ephemeral", is_flag=True, help="Accept any number of hosts; each is removed when it ends.")
@click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True, max=43_200),
    default=30.0,
    show_default=True,
    help="Minutes until the token expires.",
)
@hub_option
@output_option
def invite(*, name: str, ephemeral: bool, minutes: float, context: str | None, output: Format, **more: Any) -> None:
    """Create a join token for one host, and print what to run there.

    With --ephemeral the token is for hosts that exist for a time, such as nodes of a Slurm allocation and pods. Their
    agents remove them from the fleet; one that ends without a word is in no list from then on, and forgotten after an
    hour.
    """
    from strata.identity.tokens import read_join_token
    from strata.sdk.fleet import client_settings, current_context

    with hub_client(context) as client:
        from strata.fleet.wire.identities import InviteReply, InviteRequest

        body = InviteRequest(name=name, ephemeral=ephemeral, valid_s=minutes * 60, **more)
        made = client.call_once("POST", "/v1/invites", InviteReply, body=body)
        url = current_context(client_settings(context=context)).url
        pin = read_join_token(made.token).ca_sha256
    if output.for_programs:
        value = {"url": url, "token": made.token, "id": made.id, "expires_in_s": made.expires_in_s, "ca_pin": pin}
        print_data(value, output)
        return
    if not made.tls:
        print_error(
            "strata: other machines cannot reach this hub: it listens on loopback without TLS", hint="strata hub --tls"
        )
    there = url if url.startswith("https:") else "URL"
    if made.tls:
        print_error(f"strata: the hub's pin, for people who run 'strata login {there}':\n  {pin}")
    join = f"strata join {there} --name {name}" if name else f"strata join {there}"
    hosts = "ephemeral hosts, for" if ephemeral else "one host and"
    print_error(
        f"strata: valid for {hosts} {format_duration(made.expires_in_s)}; run '{join}' there and enter this token:"
    )
    write(made.token)


@click.command()
@click.argument("url")
@click.argument("refused", nargs=-1, metavar="")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Read the join token from FILE (default: STRATA_JOIN_TOKEN, a prompt, or stdin).",
)
@click.option("--name", metavar="NAME", help="Name of this machine in the fleet (default: its host name).")
@_state
@click.option("--service", is_flag=True, help="Install the agent as a systemd service of this user, and start it.")
def join(
    *,
    url: str,
    refused: tuple[str, ...],
    token_file: Path | None,
    name: str | None,
    state: str | None,
    service: bool,
) -> None:
    """Make this machine a host of the hub at URL.

    Reads the token of 'strata invite' from a file, from the variable STRATA_JOIN_TOKEN, from stdin or from a prompt;
    never from an argument, which every user of this machine could read. The token is valid once. It carries the pin of
    the hub's certificate authority, which is compared before the token is sent. The private key of this host is created
    here and never sent. Joining the same hub again changes nothing. A token of 'strata invite --ephemeral' is valid
    for many hosts.
    """
    from strata.base.settings import pop_secret
    from strata.cli.extras import require

    # Before another process is started, which would inherit the token.
    carried = pop_secret(TOKEN_VARIABLE)
    if refused:
        raise StrataError(
            Code.INVALID,
            "every user of this machine can read a token on the command line, and the shell's history keeps it",
            hint="make a new one with 'strata invite'; paste it at the prompt, or use --token-file FILE",
        )
    require("cryptography", extra="agent")
    from strata.fleet.agent.identity import load_membership

    settings = _settings(state)
    url = url.rstrip("/")
    try:
        member = load_membership(settings.state_folder)
    except StrataError as error:
        if error.code is not Code.PRECONDITION:
            raise
        reply = _enrol(settings, url, _token(token_file, carried), name)
        print_error(f"strata: this machine is the host {reply.name} of {url}")
    else:
        if member.url != url:
            raise StrataError(
                Code.CONFLICT, f"this machine is a host of {member.url} already", hint="run 'strata leave' first"
            )
        print_error(f"strata: this machine is the host {member.name} of {url} already")
    if service:
        from strata.cli.fleet.agent_service import install

        print_error(f"strata: the agent runs as {install(settings.state_folder)}")
    else:
        print_error("strata: start its agent with 'strata agent', or join with --service")


def _enrol(settings: AgentSettings, url: str, token: JoinToken, name: str | None) -> CertificateReply:
    import shutil
    import tempfile

    from strata.base.atomic import write_file
    from strata.base.clock import SystemClock
    from strata.base.private import private_folder
    from strata.fleet.agent.identity import save_certified
    from strata.fleet.agent.probe import hostname
    from strata.fleet.client.hub_client import RETRY_FOR_S, HubClient, TlsFiles
    from strata.fleet.wire.identities import CertificateReply, JoinRequest
    from strata.identity.ca import new_signing_request
    from strata.sdk.fleet import check_pin, fetch_authority

    if not url.startswith("https:"):
        raise StrataError(
            Code.INVALID, "a host can join only over https", hint="for a hub on this machine use 'strata up'"
        )
    pem = fetch_authority(url)
    check_pin(pem, token.ca_sha256, url)
    folder = private_folder(private_folder(settings.state_folder) / JOINING)
    if not (folder / "host.csr").exists():
        key, request = new_signing_request()
        write_file(folder / "host.key", key)
        write_file(folder / "host.csr", request)
    body = JoinRequest(
        invite_id=token.id,
        secret=token.secret.reveal(),
        name=name or hostname(),
        request_pem=(folder / "host.csr").read_text(),
    )
    with tempfile.TemporaryDirectory() as temporary:
        ca = Path(temporary) / "ca.pem"
        ca.write_bytes(pem)
        with HubClient(url, tls=TlsFiles(ca=ca), retry_for_s=RETRY_FOR_S) as client:
            reply = client.call("POST", "/v1/join", CertificateReply, body=body)
    save_certified(
        settings.state_folder,
        url,
        reply,
        key_pem=(folder / "host.key").read_bytes(),
        request_pem=(folder / "host.csr").read_bytes(),
        now_s=SystemClock().wall_s(),
    )
    shutil.rmtree(folder)
    return reply


@click.command()
@_state
@click.option("--force", is_flag=True, help="Remove the credentials also if the hub cannot be reached.")
def leave(*, state: str | None, force: bool) -> None:
    """Undo 'strata join' on this machine.

    Removes the agent's service, its credentials, and the host from the fleet. Does nothing if this machine has not
    joined a hub.
    """
    import shutil

    from strata.base.file_lock import is_locked
    from strata.cli.fleet.agent_service import remove
    from strata.fleet.agent.identity import connect_to_hub, load_membership, remove_membership

    folder = _settings(state).state_folder
    if remove():
        print_error("strata: removed the service of the agent")
    try:
        member = load_membership(folder)
    except StrataError as error:
        if error.code is not Code.PRECONDITION:
            raise
        shutil.rmtree(folder / JOINING, ignore_errors=True)
        print_error("strata: this machine is the host of no hub")
        return
    if is_locked(folder / "lock"):
        raise StrataError(
            Code.CONFLICT,
            f"an agent uses the state folder {folder}",
            hint="stop it first: systemctl stop strata-agent, or SIGTERM",
        )
    try:
        with connect_to_hub(folder) as client:
            client.call("POST", "/v1/host/leave", type(None))
    except StrataError as error:
        # A host that is rejected was revoked already, perhaps by a leave whose reply was lost.
        if error.code not in (Code.UNAUTHENTICATED, Code.FORBIDDEN) and not force:
            hint = "use --force to remove the credentials anyway; then revoke this host at the hub"
            raise StrataError(error.code, error.message, hint=hint) from error
    remove_membership(folder)
    shutil.rmtree(folder / JOINING, ignore_errors=True)
    print_error(f"strata: {member.name} has left {member.url}")


def _token(file: Path | None, carried: Secret | None) -> JoinToken:
    from strata.base.secret import Secret, read_secret
    from strata.identity.tokens import read_join_token

    if file is not None:
        secret = read_secret(file)
    elif carried is not None:
        secret = carried
    elif sys.stdin.isatty():
        secret = Secret(click.prompt("Join token", hide_input=True, err=True))
    else:
        text = sys.stdin.readline(4096).strip()
        if not text:
            raise StrataError(
                Code.INVALID,
                "there is no join token",
                hint=f"pass it on stdin, as --token-file FILE, or in {TOKEN_VARIABLE}",
            )
        secret = Secret(text)
    return read_join_token(secret.reveal())


def _settings(state: str | None) -> AgentSettings:
    from strata.base.settings import load
    from strata.fleet.agent.settings import SECTION, AgentSettings

    return load(AgentSettings, section=SECTION, file=None, flags={"state": state})
