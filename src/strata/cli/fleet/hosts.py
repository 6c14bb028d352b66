"""`strata hosts` (or `workers`): columns of the list, and the lines of one host (capacity, jobs, cards, caches)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from strata.cli.completion import complete_hosts
from strata.cli.fleet.client import (
    all_hosts,
    all_jobs,
    format_bytes,
    format_count,
    format_duration,
    host_path,
    hub_client,
    hub_view_options,
    print_rows,
    short_id,
)
from strata.cli.groups import DefaultGroup
from strata.cli.output import Format, print_data, printable, write
from strata.cli.rows import Column

if TYPE_CHECKING:
    from collections.abc import Iterator

    from strata.fleet.core.amounts import Taken
    from strata.fleet.core.capability import Capability
    from strata.fleet.records import HostJob
    from strata.fleet.wire.hosts import Host, HostAmounts, HostRoom

_HOSTS: Final = (
    Column("host", cut=20),
    Column("state"),
    Column("seen", number=True),
    Column("cores", number=True),
    Column("ram", number=True),
    Column("gpu", cut=22),
    Column("jobs", number=True),
    Column("limits"),
    Column("cpu_use", wide=True, number=True),
    Column("gpu_use", wide=True, number=True),
    Column("torch", wide=True),
    Column("cuda", wide=True),
    Column("python", wide=True),
    Column("agent", wide=True),
    Column("sandbox", wide=True),
    Column("pool", wide=True),
    Column("reason", wide=True),
    Column("id", wide=True),
)
_JOBS: Final = (
    Column("id"),
    Column("job", cut=28),
    Column("owner", cut=16),
    Column("takes", cut=40),
    Column("age", number=True),
)


@click.group(cls=DefaultGroup, default="list")
def workers() -> None:
    """List hosts with their state and hardware, or show one.

    'strata hosts' alone is 'strata hosts list'.
    """


@workers.command("list")
@hub_view_options
def list_hosts(context: str | None, output: Format) -> None:
    """List hosts with their state and hardware."""
    with hub_client(context) as client:
        from strata.fleet.core.job import HELD
        from strata.fleet.wire.jobs import JobsQuery

        hosts = all_hosts(client)
        held: dict[str, int] = {}
        for job in all_jobs(client, JobsQuery(status=tuple(HELD))):
            held[job.host_id] = held.get(job.host_id, 0) + 1
    print_rows(output, _HOSTS, ((host_row(host, held.get(host.id, 0)), _host_shown(host)) for host in hosts))


@workers.command("show")
@click.argument("host", shell_complete=complete_hosts)
@hub_view_options
def show_host(host: str, context: str | None, output: Format) -> None:
    """Show HOST: what it has for jobs, what runs there, what is free, and how it confines jobs."""
    with hub_client(context) as client:
        from strata.fleet.wire.hosts import Host, HostRoom
        from strata.fleet.wire.overview import StatusReply

        found = client.call("GET", host_path(host), Host)
        room = client.call("GET", f"{host_path(found.id)}/room", HostRoom)
        now_s = client.call("GET", "/v1/status", StatusReply).now_s
    if output.for_programs:
        import msgspec

        row = host_row(found, len(room.jobs)) | {
            "sandbox_lacks": list(found.capability.sandbox_lacks),
            "sample": found.sample,
            "capacity": msgspec.to_builtins(room.capacity),
            "free": msgspec.to_builtins(room.free),
            "held": msgspec.to_builtins(room.jobs),
        }
        print_data(row, output)
        return
    for name, value in _host_lines(found, room):
        write(f"{name:10}{printable(value)}")
    if room.jobs:
        write("")
        print_rows(output, _JOBS, (_held(job, now_s) for job in room.jobs))


def _host_lines(host: Host, room: HostRoom) -> Iterator[tuple[str, str]]:
    has, sample = host.capability, host.sample
    state = f"{host.presence}, {host.state}" if host.state != "active" else host.presence
    labels = ", ".join(f"{name}={value}" for name, value in (has.labels | host.labels).items())
    programs = [f"{name} {text}" for name, text in (("python", has.python), ("torch", has.torch), ("cuda", has.cuda))]
    lines = [
        ("host", host.name),
        ("id", host.id),
        ("state", f"{state}, seen {format_duration(host.seen_ago_s)} ago"),
        ("why", host.state_reason),
        ("pool", host.pool),
        ("labels", labels),
        ("system", ", ".join(filter(None, (f"{has.os} {has.arch}".strip(), f"agent {host.agent_version}".strip())))),
        ("programs", ", ".join(each for each in programs if not each.endswith(" "))),
        ("capacity", _amounts(room.capacity)),
        ("free", _amounts(room.free)),
        ("limits", f"{has.limits}{_job_memory(has)}"),
        ("sandbox", has.sandbox),
        *(("", lack) for lack in has.sandbox_lacks),
        ("use", ", ".join(_uses(sample))),
        ("caches", ", ".join(_caches(sample))),
    ]
    yield from ((name, value) for name, value in lines if value)
    for number, gpu in enumerate(has.gpus):
        card = gpu.uuid or str(number)
        free_gib = room.free.cards.get(card, 0.0)
        yield "card", ", ".join((f"{number}: {gpu.name}", f"{free_gib:g} GiB free", *_card_uses(sample, card)))


def _job_memory(has: Capability) -> str:
    return f", at most {format_bytes(has.job_ram_bytes)} of memory for a job" if has.job_ram_bytes else ""


def _amounts(amounts: HostAmounts) -> str:
    parts = [format_count(amounts.cores, "core"), f"{amounts.ram_gib:g} GiB of memory"]
    parts += (
        [f"{format_count(len(amounts.cards), 'card')} ({sum(amounts.cards.values()):g} GiB)"] if amounts.cards else []
    )
    parts += [] if amounts.slots is None else [format_count(amounts.slots, "slot")]
    return ", ".join(parts)


def _uses(sample: dict[str, float]) -> Iterator[str]:
    if "cpu_use" in sample:
        yield f"processors {sample['cpu_use']:.0%}"
    if "ram_used_gib" in sample:
        yield f"memory {sample['ram_used_gib']:.1f} GiB"
    if "disk_free_gib" in sample:
        yield f"{sample['disk_free_gib']:.1f} GiB of disk free"


def _caches(sample: dict[str, float]) -> Iterator[str]:
    for name in ("environments", "data"):
        if f"{name}_gib" in sample:
            yield f"{name} {sample[f'{name}_gib']:.1f} GiB"


def _card_uses(sample: dict[str, float], card: str) -> Iterator[str]:
    units = (("use", "{:.0%} busy"), ("vram_used_gib", "{:.1f} GiB used"), ("temperature_c", "{:.0f} °C"))
    for name, text in (*units, ("power_w", "{:.0f} W")):
        if f"{card}/{name}" in sample:
            yield text.format(sample[f"{card}/{name}"])


def _held(job: HostJob, now_s: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """A job of the host as JSON has it, and what tables show differently."""
    shown = {"id": short_id(job.job_id), "takes": _describe_taken(job.taken)}
    shown["age"] = format_duration(now_s - job.claimed_at_s)
    return {"id": job.job_id, "job": job.label, "owner": job.owner}, shown


def _describe_taken(taken: Taken) -> str:
    if taken.whole:
        return "the whole host"
    parts = [format_count(taken.cores, "core")] if taken.cores else []
    parts += [f"{taken.ram_gib:g} GiB"] if taken.ram_gib else []
    parts += [f"{taken.gpus:g} of {format_count(len(taken.cards), 'card')}"] if taken.cards else []
    return ", ".join(parts) or format_count(taken.slots, "slot")


def host_row(host: Host, jobs: int) -> dict[str, Any]:
    """A host as a JSON row."""
    has = host.capability
    uses = [value for name, value in host.sample.items() if name.endswith("/use")]
    return {
        "id": host.id,
        "host": host.name,
        "state": host.state,
        "presence": host.presence,
        "reason": host.state_reason or None,
        "seen_ago_s": round(host.seen_ago_s, 1),
        "jobs": jobs,
        "cpu_use": host.sample.get("cpu_use"),
        "gpu_use": sum(uses) / len(uses) if uses else None,
        "cores": has.cores,
        "ram_bytes": has.ram_bytes,
        "gpus": [{"name": gpu.name, "vram_bytes": gpu.vram_bytes} for gpu in has.gpus],
        "cuda": has.cuda or None,
        "torch": has.torch or None,
        "python": has.python or None,
        "agent": host.agent_version or None,
        "limits": has.limits,
        "sandbox": has.sandbox,
        "pool": host.pool or None,
        "labels": has.labels | host.labels,
    }


def _host_shown(host: Host) -> dict[str, Any]:
    gpus, row = host.capability.gpus, host_row(host, 0)
    cards = f"{len(gpus)}x " if len(gpus) > 1 else ""
    return {
        "state": host.presence if host.state == "active" else host.state,
        "seen": format_duration(host.seen_ago_s),
        "ram": format_bytes(host.capability.ram_bytes),
        "gpu": f"{cards}{gpus[0].name}" if gpus else None,
        **{name: f"{row[name]:.0%}" for name in ("cpu_use", "gpu_use") if row[name] is not None},
    }
