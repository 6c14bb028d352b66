"""The process of one rank. Rank 0 also serves the orchestrator.

FILE is the server's settings file. Keys of the link are read from the file that the settings name; a key is never an
argument. torch.distributed finds its rank and its peers in the environment that torchrun sets.
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
from strata.base.settings import process_environment
from strata.train.link.rank import RankLink
from strata.train.link.sockets import load_keys
from strata.train.runner.collectives import RankGroup
from strata.train.runner.model_runner import ModelRunner
from strata.train.runner.runner_dispatcher import RunnerDispatcher, follow
from strata.train.runner.settings import RunnerSettings, runner_settings
from strata.train.runner.single_node import RENDEZVOUS
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
        device = join_process_group(own, settings.rendezvous_file)
        serve(settings, own, RankGroup(device))
    except StrataError as error:
        _log.error("rank_start_failed", reason=str(error), code=error.code.value)
        return 1
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def join_process_group(settings: RunnerSettings, rendezvous_file: Path) -> torch.device:
    """Rendezvous with the other ranks: through a file on a single node, else as torchrun says. Returns the device."""
    with_cuda = settings.backend == "nccl" or (settings.backend == "auto" and torch.cuda.is_available())
    backend = "cpu:gloo,cuda:nccl" if with_cuda else "gloo"
    environment = process_environment()
    single_node = environment.get("TORCHELASTIC_RUN_ID") == RENDEZVOUS
    dist.init_process_group(
        backend,
        init_method=f"file://{rendezvous_file}" if single_node else "env://",
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
    if ranks.is_rank0:
        # Missing keys are reported before the model is loaded, which may take long.
        load_keys(settings)
    runner = ModelRunner(own, ranks)
    if not ranks.is_rank0:
        follow(runner, ranks)
        return
    # Only now: an address that accepts connections means that the model is loaded on every rank.
    # The master address of torchrun is that of rank 0's machine.
    link = RankLink(settings, process_environment().get("MASTER_ADDR", ""))
    try:
        _log.info("ranks_ready", endpoint=link.endpoint, ranks=ranks.size, model=own.name)
        RunnerDispatcher(runner, ranks, link, os.urandom(8).hex()).run()
    finally:
        link.close()
