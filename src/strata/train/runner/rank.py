"""One rank, from its start to its end. Rank 0 also talks to the orchestrator.

FILE is the server's settings file. Keys of the link are read from the file that the settings name; none is ever an
argument. The engine finds its rank and its peers in the environment that torchrun makes.
"""

from __future__ import annotations

import argparse
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from strata.base import log
from strata.base.errors import StrataError
from strata.base.settings import own_environment
from strata.train.link.rank import RankLink
from strata.train.link.sockets import load_keys
from strata.train.runner.collectives import RankGroup
from strata.train.runner.model_runner import ModelRunner
from strata.train.runner.runner_dispatcher import RunnerDispatcher, follow
from strata.train.runner.settings import RunnerSettings, runner_settings
from strata.train.runner.single_node import HERE
from strata.train.settings import ServerSettings, load_settings

_log = log.get(__name__)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m strata.train.runner", description="One rank of a training server.")
    parser.add_argument("--settings", type=Path, required=True, metavar="FILE", help="The server's settings, TOML.")
    arguments = parser.parse_args()
    settings = load_settings(arguments.settings)
    log.configure(settings.server.log_format or "json", settings.server.log_level, colour=False)
    own = runner_settings(settings)
    try:
        device = join(own, settings.meeting_place)
        serve(settings, own, RankGroup(device))
    except StrataError as error:
        _log.error("the rank cannot start", reason=str(error), code=error.code.value)
        return 1
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def join(settings: RunnerSettings, meeting_place: Path) -> torch.device:
    """Meet the other ranks: through a file if all are here, else where torchrun says. The device is this rank's."""
    with_cuda = settings.backend == "nccl" or (settings.backend == "auto" and torch.cuda.is_available())
    backend = "cpu:gloo,cuda:nccl" if with_cuda else "gloo"
    environment = own_environment()
    here = environment.get("TORCHELASTIC_RUN_ID") == HERE
    dist.init_process_group(
        backend,
        init_method=f"file://{meeting_place}" if here else "env://",
        rank=int(environment["RANK"]),
        world_size=int(environment["WORLD_SIZE"]),
        timeout=timedelta(seconds=settings.collective_timeout_s),
    )
    if not with_cuda:
        return torch.device("cpu")
    device = torch.device("cuda", dist.get_node_local_rank())
    torch.cuda.set_device(device)
    return device


def serve(settings: ServerSettings, own: RunnerSettings, ranks: RankGroup) -> None:
    if ranks.first:
        # Keys that are missing are told before the model is loaded, which may take long.
        load_keys(settings)
    runner = ModelRunner(own, ranks)
    if not ranks.first:
        follow(runner, ranks)
        return
    # Only now: an address that can be connected to means that the model is loaded on every rank.
    # torchrun says on every rank where all of them have met: that is rank 0's machine.
    link = RankLink(settings, own_environment().get("MASTER_ADDR", ""))
    try:
        _log.info("the ranks are ready", endpoint=link.endpoint, ranks=ranks.size, model=own.name)
        RunnerDispatcher(runner, ranks, link, os.urandom(8).hex()).run()
    finally:
        link.close()
