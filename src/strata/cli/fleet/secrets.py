"""`strata secrets`: set, list, remove; a value has at least 8 characters."""

from __future__ import annotations

import sys
from typing import Any, Final

import click

from strata.base.errors import Code, StrataError
from strata.cli.fleet.client import hub_client, hub_option, hub_view_options, print_rows
from strata.cli.groups import VerbGroup
from strata.cli.output import Format, print_error
from strata.cli.rows import Column

_SECRETS: Final = (Column("name"), Column("project"), Column("changed"), Column("by"))
_project_option = click.option(
    "--project", default="", metavar="PROJECT", help="For all jobs of your PROJECT (default: for all your jobs)."
)


@click.group(cls=VerbGroup)
def secrets() -> None:
    """Set, list and remove secrets of jobs.

    A job gets a secret as an environment variable if it names it: 'strata run --secret NAME', or secrets = ["NAME"] of
    a trainer. Values are encrypted at the hub. No command shows them.
    """


@secrets.command("set")
@click.argument("name")
@_project_option
@hub_option
def set_secret(name: str, project: str, context: str | None) -> None:
    """Set the secret NAME. The value is read from a prompt or from standard input."""
    value = _read_value(name)
    with hub_client(context) as client:
        import msgspec

        from strata.fleet.wire.owners import SecretQuery, SecretRequest

        try:
            body = msgspec.convert({"value": value}, SecretRequest)
        except msgspec.ValidationError:
            raise StrataError(Code.INVALID, "a secret has at least 8 characters, and no NUL") from None
        query = msgspec.convert({"project": project}, SecretQuery)
        client.call("PUT", _path(name), type(None), body=body, query=query)
    print_error(f"strata: the secret {name} is set")


@secrets.command("list")
@_project_option
@hub_view_options
def list_secrets(project: str, context: str | None, output: Format) -> None:
    """List the names of secrets, without their values."""
    with hub_client(context) as client:
        import datetime

        import msgspec

        from strata.fleet.wire.owners import SecretQuery, SecretsReply, StoredSecretReply

        query = msgspec.convert({"project": project}, SecretQuery)
        listed = client.call("GET", "/v1/secrets", SecretsReply, query=query).secrets

    def row(each: StoredSecretReply) -> tuple[dict[str, Any], dict[str, Any]]:
        date = datetime.datetime.fromtimestamp(each.changed_at_s, datetime.UTC).date().isoformat()
        value = {"name": each.name, "project": each.project or None, "by": each.changed_by}
        return value | {"changed_at_s": each.changed_at_s}, {"changed": date}

    print_rows(output, _SECRETS, map(row, listed))


@secrets.command("rm")
@click.argument("name")
@_project_option
@hub_option
def remove(name: str, project: str, context: str | None) -> None:
    """Remove the secret NAME. Jobs that name it cannot start any more."""
    with hub_client(context) as client:
        import msgspec

        from strata.fleet.wire.owners import SecretQuery

        query = msgspec.convert({"project": project}, SecretQuery)
        client.call("DELETE", _path(name), type(None), query=query)
    print_error(f"strata: the secret {name} is removed")


def _path(name: str) -> str:
    from urllib.parse import quote

    return f"/v1/secret/{quote(name, safe='')}"


def _read_value(name: str) -> str:
    if sys.stdin.isatty():
        return str(click.prompt(f"Value of {name}", hide_input=True, err=True))
    return sys.stdin.read().removesuffix("\n")
