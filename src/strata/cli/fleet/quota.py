"""`strata quota`: list and set quotas, and the parsing of `500/30d`, `0:10`, `500GiB`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import click

from strata.cli.fleet.client import format_bytes, format_duration, hub_client, hub_option, hub_view_options, print_rows
from strata.cli.groups import DefaultGroup
from strata.cli.output import Format, print_error
from strata.cli.rows import Column

if TYPE_CHECKING:
    from strata.fleet.wire.owners import OwnerQuota

_QUOTAS: Final = (
    Column("owner", cut=24),
    Column("jobs", number=True),
    Column("of", number=True),
    Column("priority"),
    Column("gpu_hours", number=True),
    Column("of_hours", number=True),
    Column("window", number=True),
    Column("stored", number=True),
    Column("of_stored", number=True),
    Column("set", wide=True),
)
_RANGE: Final = re.compile(r"(-?[0-9]{1,7}):(-?[0-9]{1,7})")
_SIZE: Final = re.compile(r"([0-9]{1,9})(B|KiB|MiB|GiB|TiB)")
_SHIFTS: Final = {"B": 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}
_HOURS: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)(?:/([0-9]{1,4})d)?")


def _read_range(text: str) -> tuple[int, int]:
    """Reads `LOW:HIGH`."""
    match = _RANGE.fullmatch(text)
    if match is None:
        raise click.BadParameter(f"{text!r} is not a range of priorities: write LOW:HIGH, such as 0:10")
    return int(match[1]), int(match[2])


def _read_hours(text: str) -> tuple[float | None, float]:
    """Reads `HOURS/DAYSd` or `any`, as hours and seconds."""
    if text == "any":
        return None, 30 * 86_400.0
    match = _HOURS.fullmatch(text)
    if match is None or match[2] == "0":
        raise click.BadParameter(f"{text!r} is no number of hours: write 500/30d, or any")
    return float(match[1]), int(match[2] or 30) * 86_400.0


def _read_count(text: str) -> int | None:
    """Reads a number, or `any`."""
    if text == "any":
        return None
    if not text.isascii() or not text.isdigit():
        raise click.BadParameter(f"{text!r} is no number of jobs, nor 'any'")
    return int(text)


def _read_bytes(text: str) -> int | None:
    """Reads `500GiB`, or `any`, as bytes."""
    if text == "any":
        return None
    match = _SIZE.fullmatch(text)
    if match is None:
        raise click.BadParameter(f"{text!r} is no size: write 500GiB, 20MiB or any")
    return int(match[1]) << _SHIFTS[match[2]]


@click.group(cls=DefaultGroup, default="list")
def quota() -> None:
    """Show what each owner may use of the fleet, or change it.

    Operators have no quota.
    """


@quota.command("list")
@hub_view_options
def list_quotas(context: str | None, output: Format) -> None:
    """Show the quota and the usage of each owner. '*' is the quota of owners that have none of their own."""
    with hub_client(context) as client:
        from strata.fleet.wire.owners import QuotasReply

        listed = client.call("GET", "/v1/quotas", QuotasReply).quotas
    print_rows(output, _QUOTAS, ((_row(each), _shown(each)) for each in listed))


@quota.command("set")
@click.argument("owner")
@click.option("--jobs", type=_read_count, metavar="N", help="Jobs that may wait or run, or 'any'.")
@click.option("--priority", type=_read_range, metavar="LOW:HIGH", help="Range of priorities, such as 0:10.")
@click.option("--gpu-hours", type=_read_hours, metavar="N/DAYSd", help="GPU hours in so many days, or 'any'.")
@click.option(
    "--bytes", "size", type=_read_bytes, metavar="SIZE", help="Stored sources, data and results: 500GiB, or 'any'."
)
@hub_option
def set_quota(
    *,
    owner: str,
    jobs: int | None,
    priority: tuple[int, int] | None,
    gpu_hours: tuple[float | None, float] | None,
    size: int | None,
    context: str | None,
) -> None:
    """Set the quota of OWNER, or with '*' of every owner without one. What is not named stays."""
    with hub_client(context) as client:
        import msgspec

        from strata.fleet.core.quota import EVERYBODY
        from strata.fleet.wire.owners import QuotaRequest, QuotasReply

        listed = {each.owner: each.quota for each in client.call("GET", "/v1/quotas", QuotasReply).quotas}
        changes: dict[str, Any] = {}
        # 'any' is None as well: what counts is whether the option was given.
        source = click.get_current_context().get_parameter_source
        if source("jobs") is not click.core.ParameterSource.DEFAULT:
            changes["jobs"] = jobs
        if source("size") is not click.core.ParameterSource.DEFAULT:
            changes["bytes"] = size
        if priority is not None:
            changes["min_priority"], changes["max_priority"] = priority
        if gpu_hours is not None:
            changes["gpu_hours"], changes["window_s"] = gpu_hours
        if not changes:
            raise click.UsageError("name what to set: --jobs, --priority, --gpu-hours or --bytes")
        before = listed.get(owner, listed[EVERYBODY])
        body = QuotaRequest(owner=owner, quota=msgspec.structs.replace(before, **changes))
        client.call("POST", "/v1/quotas", type(None), body=body)
    print_error(f"strata: the quota of {owner} is set")


@quota.command()
@click.argument("owner")
@hub_option
def remove(owner: str, context: str | None) -> None:
    """Give OWNER the quota of every owner again."""
    with hub_client(context) as client:
        from strata.fleet.wire.owners import QuotaRequest

        client.call("POST", "/v1/quotas", type(None), body=QuotaRequest(owner=owner, quota=None))
    print_error(f"strata: {owner} has no quota of its own")


def _row(each: OwnerQuota) -> dict[str, Any]:
    return {
        "owner": each.owner,
        "jobs": each.usage.jobs,
        "max_jobs": each.quota.jobs,
        "min_priority": each.quota.min_priority,
        "max_priority": each.quota.max_priority,
        "gpu_hours": each.usage.gpu_hours,
        "max_gpu_hours": each.quota.gpu_hours,
        "window_s": each.quota.window_s,
        "bytes": each.usage.bytes,
        "max_bytes": each.quota.bytes,
        "set": each.own,
    }


def _shown(each: OwnerQuota) -> dict[str, Any]:
    quota = each.quota
    return {
        "of": "any" if quota.jobs is None else quota.jobs,
        "priority": f"{quota.min_priority}:{quota.max_priority}",
        "gpu_hours": round(each.usage.gpu_hours, 1),
        "of_hours": "any" if quota.gpu_hours is None else f"{quota.gpu_hours:g}",
        "window": format_duration(quota.window_s),
        "stored": format_bytes(each.usage.bytes),
        "of_stored": "any" if quota.bytes is None else format_bytes(quota.bytes),
        "set": "own" if each.own else "default",
    }
