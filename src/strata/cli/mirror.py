"""`strata mirror`: copy metrics of jobs or models to an experiment tracker."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from strata.base.errors import StrataError
from strata.cli.fleet.client import format_count, hub_client, hub_option
from strata.cli.options import config_option
from strata.cli.output import print_error
from strata.cli.training_server import connect_server, key_file_option
from strata.cli.watch import TRANSIENT

if TYPE_CHECKING:
    from strata.sdk.trackers.mirror import Mirror
    from strata.sdk.trackers.sources import MetricSource

ANSWER_S = 60.0


@click.command()
@click.option("--to", metavar="TRACKER", help="tensorboard:FOLDER, wandb:PROJECT or wandb:ENTITY/PROJECT.")
@click.option("--offline", is_flag=True, default=None, help="Let W&B write files for 'wandb sync'; connect to nothing.")
@click.option("--folder", metavar="FOLDER", help="Record here how far it is (default ~/.local/state/strata/mirror).")
@click.option("--project", default="", metavar="NAME", help="Mirror only jobs of this project.")
@click.option("--sweep", default="", metavar="NAME", help="Mirror only jobs of this sweep.")
@click.option("--owner", default="", metavar="NAME", help="Mirror only jobs of this owner.")
@click.option("--server", metavar="URL|CONFIG", help="Mirror the models of this training server instead of jobs.")
@click.option("--once", is_flag=True, help="Copy what is there and exit.")
@config_option("mirror")
@key_file_option
@hub_option
def mirror(  # noqa: PLR0913 (the options of the command)
    *,
    to: str | None,
    offline: bool | None,
    folder: str | None,
    project: str,
    sweep: str,
    owner: str,
    server: str | None,
    once: bool,
    config: Path | None,
    key_file: Path | None,
    context: str | None,
) -> None:
    """Copy metrics to TensorBoard, W&B or another tracker, as they come.

    Reads what the trainers of jobs report, of all attempts, or with --server the metrics of the passes and steps of
    your models. It runs until Ctrl-C and continues where it was when it is started again: no point is doubled. Use
    one --folder for each tracker.
    """
    from strata.base.settings import load
    from strata.cli.extras import require
    from strata.sdk.trackers.mirror import SECTION, Mirror, MirrorSettings, make_tracker

    flags = {"to": to, "offline": offline, "folder": folder}
    settings = load(MirrorSettings, section=SECTION, file=config, flags=flags)
    needed = {"tensorboard": "tensorboardX", "wandb": "wandb"}.get(settings.to.partition(":")[0])
    if needed:
        require(needed, extra="trackers")
    tracker = make_tracker(settings)
    with ExitStack() as stack:
        if server is None:
            source = _jobs(stack, context, project, sweep, owner)
        else:
            source = _models(stack, server, key_file, context)
        copier = Mirror(source, tracker, settings.folder.expanduser())
        stack.callback(copier.close)
        if once:
            print_error(f"strata: {format_count(copier.run_once(), 'point')} copied to {settings.to}")
            return
        print_error(f"strata: copying metrics to {settings.to}; Ctrl-C ends it")
        while True:
            _round(copier)
            time.sleep(settings.every_s)


def _jobs(stack: ExitStack, context: str | None, project: str, sweep: str, owner: str) -> MetricSource:
    client = stack.enter_context(hub_client(context, timeout_s=ANSWER_S))
    from strata.fleet.wire.jobs import JobsQuery
    from strata.sdk.trackers.sources import HubJobs

    return HubJobs(client, JobsQuery(project=project, sweep=sweep, owner=owner))


def _models(stack: ExitStack, server: str, key_file: Path | None, context: str | None) -> MetricSource:
    from strata.sdk.trackers.sources import ServerModels

    client = connect_server(server, key_file, context, timeout_s=ANSWER_S)
    return ServerModels(stack.enter_context(client))


def _round(copier: Mirror) -> None:
    try:
        copier.run_once()
    except StrataError as error:
        if error.code not in TRANSIENT:
            raise
        print_error(f"strata: {error.message}; trying again")
