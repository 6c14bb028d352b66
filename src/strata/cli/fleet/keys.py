"""`strata keys`: create, list, revoke API keys; columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from strata.base.errors import Code, StrataError
from strata.cli.fleet.client import hub_client, hub_option, hub_view_options, print_rows
from strata.cli.groups import VerbGroup
from strata.cli.output import Format, output_option, print_data, print_error, write
from strata.cli.rows import Column

if TYPE_CHECKING:
    from strata.fleet.wire.identities import HubKey

_KEYS: Final = (Column("id"), Column("name", cut=30), Column("role"), Column("state"), Column("expires"))
DAY_S: Final = 86_400.0


@click.group(cls=VerbGroup)
def keys() -> None:
    """Create, list and revoke API keys of people and programs.

    A key has a role: viewer, researcher, operator or admin.
    """


@keys.command()
@click.argument("name")
@click.option(
    "--role",
    type=click.Choice(["viewer", "researcher", "operator", "admin"]),
    required=True,
    help="What the key may do.",
)
@click.option(
    "--days", type=click.FloatRange(min=0, min_open=True, max=3650), help="Days until the key expires (default: never)."
)
@click.option("--owner", is_flag=True, help="On 'strata up': confirm that the key is your own. Its jobs run as you.")
@hub_option
@output_option
def create(*, name: str, role: str, days: float | None, owner: bool, context: str | None, output: Format) -> None:
    """Create a key called NAME and print its secret, which is shown only once."""
    with hub_client(context) as client:
        import msgspec

        from strata.fleet.wire.identities import HubKeyReply, HubKeyRequest

        valid_s = None if days is None else days * DAY_S
        wanted = {"name": name, "role": role, "valid_s": valid_s, "owner": owner}
        body = msgspec.convert(wanted, HubKeyRequest)
        made = client.call_once("POST", "/v1/keys", HubKeyReply, body=body)
    if output.for_programs:
        print_data(msgspec.structs.asdict(made.key) | {"secret": made.secret}, output)
        return
    print_error(f"strata: key {made.key.id} for {name}, {role}; the secret is shown only now")
    write(made.secret)


@keys.command("list")
@hub_view_options
def list_keys(context: str | None, output: Format) -> None:
    """List keys, without their secrets."""
    with hub_client(context) as client:
        from strata.fleet.wire.identities import KeysReply

        listed = client.call("GET", "/v1/keys", KeysReply).keys
    from msgspec.structs import asdict

    print_rows(output, _KEYS, ((asdict(key), _shown(key)) for key in listed))


@keys.command()
@click.argument("key")
@hub_option
def revoke(key: str, context: str | None) -> None:
    """Revoke KEY, given by its id or a prefix of it. Its holder is rejected from now on."""
    with hub_client(context) as client:
        from strata.fleet.wire.identities import KeysReply

        matches = [each for each in client.call("GET", "/v1/keys", KeysReply).keys if each.id.startswith(key)]
        exact = [each for each in matches if each.id == key] or matches
        if len(exact) != 1:
            code, word = (
                (Code.INVALID, "several keys have an id that begins")
                if exact
                else (Code.NOT_FOUND, "no key has an id that begins")
            )
            raise StrataError(code, f"{word} with {key[:80]!r}", hint="strata keys list")
        client.call("POST", f"/v1/key/{exact[0].id}/revoke", type(None))
    print_error(f"strata: the key {exact[0].id} ({exact[0].name}) is revoked")


def _shown(key: HubKey) -> dict[str, Any]:
    import datetime

    until = key.expires_at_s
    date = None if until is None else datetime.datetime.fromtimestamp(until, datetime.UTC).date().isoformat()
    return {"state": "good" if key.revoked_at_s is None else "revoked", "expires": date}
