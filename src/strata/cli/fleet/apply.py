"""`strata apply` and `strata reload`: upload of bundles, the printed plan (10 jobs shown), confirmation, and what is
queued.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from strata.cli.fleet.client import format_bytes, format_count, hub_client, hub_option, short_id
from strata.cli.fleet.wait import print_not_cancelled, wait_for
from strata.cli.output import Format, output_option, print_data, print_error, printable, write

if TYPE_CHECKING:
    from strata.cli.fleet.prepare import PreparedManifest
    from strata.fleet.client.hub_client import HubClient
    from strata.fleet.core.jobspec import DataSource
    from strata.fleet.wire.manifests import ManifestReply, Trainer

MOST_SHOWN: Final = 10
"""How many changes the confirmation lists."""
_REQUEUED: Final = "runs again, its result was made by another trainer or outside a manifest"


@click.command()
@click.argument("manifest", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--dry-run", is_flag=True, help="Show the plan and change nothing.")
@click.option("-y", "--yes", is_flag=True, help="Apply changes to existing jobs without confirmation.")
@click.option("--wait", "waits", is_flag=True, help="Wait until every job of the manifest has ended, as 'strata wait'.")
@click.option("--accept", is_flag=True, help="Accept results of jobs that ran before a manifest named them.")
@click.option("--retrain", is_flag=True, help="Run completed jobs again if an earlier trainer made their result.")
@click.option(
    "--take-over",
    is_flag=True,
    help="Take over sweeps of another file, and policies of [hosts.NAME] of another project.",
)
@click.option(
    "--describe/--no-describe",
    default=None,
    help="Run every trainer, or none, with --describe to check parameters (default: if it calls handle_describe).",
)
@hub_option
@output_option
def apply(  # noqa: PLR0913 (the options of the command)
    *,
    manifest: Path,
    dry_run: bool,
    yes: bool,
    waits: bool,
    accept: bool,
    retrain: bool,
    take_over: bool,
    describe: bool | None,
    context: str | None,
    output: Format,
) -> None:
    """Queue the jobs of MANIFEST, and update those that differ.

    Nothing is removed: jobs that are no longer in the manifest stay until you cancel them, schedules until you remove
    them, sweeps go on until you stop them, and hosts that it does not name keep their policies. A sweep belongs to the
    file that declared it: another file changes it only with --take-over. Only trainers and jobs of the manifest's own
    project change. Pending jobs use a changed trainer; completed jobs stay as they are unless you --retrain them. A
    trainer's folder that is relative to MANIFEST is uploaded, without the files that .strataignore or .gitignore name,
    caches, virtual environments and .env.

    A trainer whose program calls strata.fleet.trainer.handle_describe is run with --describe in a copy of its folder,
    so that a misspelt parameter is found now; never in a dry run. No other program is started.
    """
    from strata.cli.fleet.prepare import prepare_manifest
    from strata.fleet.core.schedule import format_moment

    def find_artifacts(sources: Mapping[str, DataSource]) -> dict[str, DataSource]:
        from strata.cli.fleet.data import print_data
        from strata.sdk.datasets import resolve_data

        with hub_client(context) as client:
            return resolve_data(client, sources, print_data)

    prepared = prepare_manifest(
        manifest, lambda line: print_error(f"strata: {line}"), find_artifacts, describe=describe, dry_run=dry_run
    )
    options = {"accept": accept, "retrain": retrain, "take_over": take_over}
    with hub_client(context, timeout_s=120.0) as client:
        trainers = registered_trainers(client)
        prepared.check_hyper(_schemas(prepared, trainers))
        plan = send_manifest(client, prepared, options, dry_run=True)
        if not dry_run:
            changes = plan.changed or plan.orphaned or plan.requeued
            if changes and not yes and sys.stdin.isatty() and sys.stderr.isatty():
                _show_changes(plan)
                click.confirm(f"{plan.summary}\nApply?", default=True, abort=True, err=True)
            # Fetched again: while the confirmation was open, another apply may have replaced a trainer and its source.
            upload_sources(client, prepared, registered_trainers(client))
            plan = send_manifest(client, prepared, options, dry_run=False)
        _show(plan, prepared, output, applied=not dry_run)
        _print_sweeps(prepared, plan, waits=waits and not dry_run)
        for name, due_s in plan.schedules.items():
            print_error(f"strata: {name} is due next at {format_moment(due_s)}")
        if waits and not dry_run:
            try:
                # A sweep that is stopped queues none of its points.
                jobs = [id_ for id_, spec in prepared.manifest.jobs.items() if spec.sweep not in plan.stopped]
                ended = wait_for(client, jobs, only_news=True)
            except KeyboardInterrupt:
                print_not_cancelled(f"what {manifest} queued", "JOB")
                raise
            click.get_current_context().exit(ended)


def _print_sweeps(prepared: PreparedManifest, plan: ManifestReply, *, waits: bool) -> None:
    for name, sweep in prepared.manifest.searches.items():
        if name not in plan.stopped:
            print_error(f"strata: the hub queues the {sweep.search.trials} trials of {name}, as places become free")
            if waits:
                print_error(f"strata: --wait does not wait for them; 'strata sweeps' shows how far {name} is")
    for name in plan.stopped:
        print_error(f"strata: {name} is stopped and makes no trials; 'strata sweeps resume {name}' goes on with it")


@click.command()
@hub_option
@output_option
def reload(context: str | None, output: Format) -> None:
    """Apply the manifest in the hub's settings, as the file is now."""
    with hub_client(context, timeout_s=120.0) as client:
        from strata.fleet.wire.manifests import ManifestReply

        plan = client.call("POST", "/v1/manifest/reload", ManifestReply)
    _show(plan, None, output, applied=True)


def send_manifest(
    client: HubClient, prepared: PreparedManifest, options: dict[str, bool], *, dry_run: bool
) -> ManifestReply:
    from strata.fleet.wire.manifests import ManifestReply, ManifestRequest

    body = ManifestRequest(manifest=prepared.manifest, schemas=prepared.schemas, dry_run=dry_run, **options)
    return client.call("POST", "/v1/manifest", ManifestReply, body=body)


def registered_trainers(client: HubClient) -> dict[str, Trainer]:
    """The trainers of all projects that the hub has, by their qualified names."""
    from strata.fleet.wire.manifests import TrainersReply

    return client.call("GET", "/v1/trainers", TrainersReply).trainers


def _schemas(prepared: PreparedManifest, trainers: dict[str, Trainer]) -> dict[str, Any]:
    """The parameter schemas of the manifest's trainers that the hub has, by their plain names."""
    from strata.fleet.core.jobspec import qualified_trainer

    manifest = prepared.manifest
    named = {name: trainers.get(qualified_trainer(manifest.project, name)) for name in manifest.trainers}
    return {name: trainer.params for name, trainer in named.items() if trainer is not None and trainer.params}


def upload_sources(client: HubClient, prepared: PreparedManifest, trainers: dict[str, Trainer]) -> None:
    """Send the sources that no trainer at the hub has yet."""
    from strata.fleet.wire.artifacts import CommitReply

    there = {trainer.spec.bundle for trainer in trainers.values()}
    for name, bundle in prepared.bundles.items():
        if bundle.sha256 not in there:
            client.send("PUT", f"/v1/source/{bundle.sha256}", bundle.content, CommitReply)
            there.add(bundle.sha256)
            what = f"{format_count(bundle.files, 'file')}, {format_bytes(len(bundle.content))}"
            print_error(f"strata: sent the source of trainer {name} ({what})")


def _show_changes(plan: ManifestReply) -> None:
    for change in plan.changed[:MOST_SHOWN]:
        later = ", from the next attempt on" if change.deferred else ""
        print_error(f"  ~ {short_id(change.id)}  {change.label}: {', '.join(change.kinds)}{later}")
    if len(plan.changed) > MOST_SHOWN:
        print_error(f"  ~ and {len(plan.changed) - MOST_SHOWN} more; all of them with --dry-run")
    for job_id in plan.orphaned[:MOST_SHOWN]:
        print_error(f"  \N{MINUS SIGN} {short_id(job_id)}: no longer in the manifest, kept")
    if len(plan.orphaned) > MOST_SHOWN:
        print_error(f"  \N{MINUS SIGN} and {len(plan.orphaned) - MOST_SHOWN} more")
    for job in plan.requeued[:MOST_SHOWN]:
        print_error(f"  ~ {short_id(job.id)}  {job.label}: {_REQUEUED}")
    if len(plan.requeued) > MOST_SHOWN:
        print_error(f"  ~ and {len(plan.requeued) - MOST_SHOWN} more run again")


def _show(plan: ManifestReply, prepared: PreparedManifest | None, output: Format, *, applied: bool) -> None:
    import msgspec

    if output.for_programs:
        more: dict[str, Any] = {} if prepared is None else {"jobs": list(prepared.manifest.jobs)}
        print_data(msgspec.to_builtins(plan) | more, output)
        return
    write(plan.summary)
    if output is Format.WIDE or not applied:
        for job in plan.new:
            write(f"  + {short_id(job.id)}  {printable(job.label)}")
        for change in plan.changed:
            write(f"  ~ {short_id(change.id)}  {printable(change.label)}: {', '.join(change.kinds)}")
        for job in plan.requeued:
            write(f"  ~ {short_id(job.id)}  {printable(job.label)}: {_REQUEUED}")
        for job_id in plan.outdated:
            write(f"  = {short_id(job_id)}  completed by an earlier trainer; --retrain runs it again")
    if not applied:
        print_error("strata: a dry run, nothing is changed")
