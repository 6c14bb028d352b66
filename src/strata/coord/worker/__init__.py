"""The worker's side of a job: `import strata.coord.worker as strata`.

    with strata.join() as worker:                         # address and name from STRATA_WORKER_…, or as arguments
        worker.dataset("corpus", ["a.jsonl", "b.jsonl"])
        for epoch in worker.epochs(10):
            for shard in worker.shards("corpus", epoch):  # consumed when the next one is requested
                train(shard.open())
            worker.barrier(f"epoch_{epoch}")
            worker.checkpoint(step, "part-0.bin")         # committed when every rank has reported that step

When members join or leave, the next call raises an error whose `reason_of` is MEMBERSHIP_CHANGED; `worker.recover()`
rewinds all workers to the last checkpoint and returns it. With `elastic=True` the job continues without that.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import signal
from typing import Any, Final

import msgspec

from strata.base.clock import SystemClock
from strata.base.describe import refuse_describe
from strata.base.errors import Code, StrataError
from strata.base.parent import end_with_parent
from strata.base.settings import load
from strata.coord.core.facts import CommandKind
from strata.coord.worker.blocking import Worker
from strata.coord.worker.checkpoints import Manifest, Part, Reported, verify_part
from strata.coord.worker.client import AsyncWorker
from strata.coord.worker.commands import Command, OnCommand
from strata.coord.worker.garbage_collector import Swept
from strata.coord.worker.readers import count_samples
from strata.coord.worker.reasons import Reason, reason_of
from strata.coord.worker.session import MemberAddress
from strata.coord.worker.settings import SECTION, Tls, WorkerSettings
from strata.coord.worker.shard import DatasetOptions, FileSlice, Shard
from strata.coord.worker.stores import S3Settings

TORCHRUN_VARIABLES: Final = {"RANK": "rank", "WORLD_SIZE": "wait_for"}

__all__ = [
    "AsyncWorker",
    "Code",
    "Command",
    "CommandKind",
    "DatasetOptions",
    "FileSlice",
    "Manifest",
    "MemberAddress",
    "Part",
    "Reason",
    "Reported",
    "S3Settings",
    "Shard",
    "StrataError",
    "Swept",
    "Tls",
    "Worker",
    "WorkerSettings",
    "count_samples",
    "join",
    "join_async",
    "reason_of",
    "verify_part",
]


def join(*, on_command: OnCommand | None = None, s3: S3Settings | None = None, **settings: Any) -> Worker:
    """A worker for `with`. Settings are those of `WorkerSettings` by name; what is not given is in STRATA_WORKER_…

    `on_command` is called in a thread of its own with every command; a command counts as carried out when it returns.
    `s3` is how to reach s3://; what is not given is in STRATA_S3_… or AWS_…, and looked for when it is needed.
    """
    refuse_describe("join")
    found = _settings(settings)
    _refuse_in_import()
    return Worker(lambda: AsyncWorker(found, SystemClock(), on_command, s3))


def join_async(*, on_command: OnCommand | None = None, s3: S3Settings | None = None, **settings: Any) -> AsyncWorker:
    """The same for `async with`, inside a running event loop."""
    refuse_describe("join_async")
    _refuse_in_import()
    return AsyncWorker(_settings(settings), SystemClock(), on_command, s3)


def _refuse_in_import() -> None:
    """A process that multiprocessing starts imports the program first, and would take the place of its creator."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise StrataError(
            Code.PRECONDITION,
            "a process of multiprocessing imports this program, and would join in place of the worker that started it",
            hint='begin the program with: if __name__ == "__main__":',
        )


def _settings(given: dict[str, Any]) -> WorkerSettings:
    flags = {name.replace("tls_", "tls.", 1): value for name, value in given.items()}
    found = load(WorkerSettings, section=SECTION, file=None, flags=flags)
    if not found.torchrun:
        return found
    # A torchrun that is killed leaves its workers, and a signal is how `strata gang run` asks for their stacks.
    end_with_parent(signal.SIGKILL)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    ranked = load(WorkerSettings, section=SECTION, file=None, flags=flags, aliases=TORCHRUN_VARIABLES)
    return msgspec.structs.replace(ranked, id=ranked.id or f"rank-{ranked.rank}")
