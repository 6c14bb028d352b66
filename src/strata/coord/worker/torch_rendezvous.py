"""torchrun's rendezvous over the coordinator (`torchrun --rdzv-backend strata`): rounds, ranks of nodes, the store of
the workers, spare nodes, and the timeouts and backoff of joining.

The torchrun of each host, a node, is a member of the job `JOB/nodes`. A generation of that job is a round of the
rendezvous: the node's rank is its rank there, and the store of the workers is on the node of rank 0, whose address its
registration named. A node that comes or is lost begins the next generation, and so does one whose workers failed; every
node sees that and starts its workers again. The workers are told where the coordinator is, and join `JOB` with the
ranks that torch gave them. With `check_hosts` the nodes of a round first compare their hosts, and one that is broken
leaves with the reason.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Final, NoReturn
from urllib.parse import unquote

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from strata.base import log
from strata.base.clock import SystemClock
from strata.base.errors import Code, StrataError
from strata.base.retry import Backoff
from strata.base.settings import load, put_variables
from strata.coord.core.facts import nodes_job
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.worker.blocking import Worker
from strata.coord.worker.client import AsyncWorker
from strata.coord.worker.link import CoordinatorLink, Deadline
from strata.coord.worker.session import ATTEMPT_S, MemberAddress
from strata.coord.worker.settings import SECTION, WorkerSettings

BACKEND: Final = "strata"
LOOK_S: Final = 0.1
SPARE_LOOK_S: Final = 2.0
"""Time between two looks of a node that the job has no room for."""
STORE_TIMEOUT: Final = timedelta(seconds=60)
"""Time for what a node tells the others between the rendezvous and the start of the workers; one may die in between."""
LOST_S: Final = 60.0
"""A node that died resets its connections at once; the coordinator evicts it later, by default within 40 s."""
BACKOFF: Final = Backoff(first_s=1.0, most_s=30.0)
STEADY_S: Final = 300.0
"""Workers that ran for so long have not failed at once: the backoff begins anew."""

_log = log.get(__name__)


class StrataRendezvous(RendezvousHandler):
    """One node of a job, between its first `next_rendezvous` and `shutdown`."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._job = parameters.run_id
        self._min, self._max = parameters.min_nodes, parameters.max_nodes
        self._join_s = float(parameters.get("join_timeout", 600))
        self._last_call_s = float(parameters.get("last_call_timeout", 5))
        self._failure_file = _file(parameters, "failure_file")
        self._refusal_file = _file(parameters, "refusal_file")
        """A file for the reason why this host must not take part."""
        check = parameters.get("check_hosts", "")
        self._check_factor = float(check) if check else None
        if self._check_factor is not None and not self._check_factor > 1:
            raise StrataError(
                Code.INVALID, f"check_hosts must be above 1, not {check}: how many times slower is too slow"
            )
        self._excluded: list[str] = []
        """The hosts that a check has excluded, and why."""
        address = {"address": parameters.endpoint} if parameters.endpoint else {}
        base = load(WorkerSettings, section=SECTION, file=None, flags={**address, "job": nodes_job(self._job)})
        self._ip = parameters.local_addr or _address_towards(base.addresses[0])
        # The nodes' own store: where rank 0 tells the others, in every round, about the store of the workers.
        self._nodes_store = _listen(self._ip)
        self._workers_store: TCPStore | None = None
        self._settings = load(
            WorkerSettings,
            section=SECTION,
            file=None,
            flags={
                **address,
                "job": nodes_job(self._job),
                # In namespaces of their own two nodes of one host have the same process id.
                "id": f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}",
                "ip": self._ip,
                "port": self._nodes_store.port,
                "elastic": True,
                "rejoin": True,
                "patience_s": self._join_s,
                "torchrun": False,
            },
        )
        self._stack = ExitStack()
        self._node: Worker | None = None
        self._round = 0
        self._began_s = 0.0
        self._failures = 0
        put_variables(
            {
                "STRATA_WORKER_ADDRESS": self._settings.address,
                "STRATA_WORKER_JOB": self._job,
                "STRATA_WORKER_IP": self._ip,
                "STRATA_WORKER_TORCHRUN": "yes",
            }
        )

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._job

    @property
    def use_agent_store(self) -> bool:
        """The store of the workers belongs to the node of rank 0, and is a new one in every round."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        deadline_s = time.monotonic() + self._join_s
        try:
            if self._node is None:
                self._join(deadline_s)
            elif not self._is_round_over():
                self._restart(self._node)
            while True:
                self._gather(deadline_s)
                info = self._begin_round()
                if info is not None:
                    return info
                _check_time(deadline_s, "the nodes keep coming and going")
        except StrataError as error:
            if error.code is Code.DEADLINE:
                raise RendezvousTimeoutError(str(error)) from error
            raise RendezvousConnectionError(str(error)) from error

    def _join(self, deadline_s: float) -> None:
        """Once there are fewer nodes than may take part: one more would only make the others start again."""
        while True:
            node = Worker(lambda: AsyncWorker(self._settings, SystemClock()))
            while asyncio.run(_count_members(self._settings)) >= self._max:
                _check_time(deadline_s, f"job {self._job!r} has {self._max} nodes and takes no more")
                time.sleep(SPARE_LOOK_S)
            self._node = self._stack.enter_context(node)
            if node.rank < self._max:
                break
            self._leave()
        until_s = time.monotonic() + self._last_call_s
        while time.monotonic() < until_s and node.world_size < self._max:
            time.sleep(LOOK_S)
            if node.is_stale:
                node.follow()

    def _restart(self, node: Worker) -> None:
        """The workers of this node failed, and no node came or went: the others have to start theirs again too."""
        if time.monotonic() - self._began_s > STEADY_S:
            self._failures = 0
        self._failures += 1
        until_s = time.monotonic() + BACKOFF.delay_s(self._failures, random.random())  # noqa: S311 - only jitter
        while time.monotonic() < until_s and not self._is_round_over():
            time.sleep(LOOK_S)
        if not self._is_round_over():
            node.recover(f"the workers of {node.worker_id} failed")

    def _gather(self, deadline_s: float) -> None:
        """Waits until enough nodes of one generation are here, none of which runs workers of an earlier round."""
        node = self._joined()
        while True:
            if node.is_stale:
                node.follow()
            if node.world_size < self._min:
                reason = f"{node.world_size} of at least {self._min} nodes"
                _check_time(deadline_s, "; ".join((reason, *self._excluded)))
                time.sleep(LOOK_S)
                continue
            node.barrier("round", timeout_s=max(deadline_s - time.monotonic(), LOOK_S))
            if node.generation != self._round and node.world_size >= self._min:
                return

    def _begin_round(self) -> RendezvousInfo | None:
        """None: the members changed meanwhile."""
        node = self._joined()
        generation, rank, world_size = node.generation, node.rank, node.world_size
        members = node.members()
        if node.generation != generation:
            return None
        try:
            first = members[0]
            theirs = self._nodes_store if rank == 0 else TCPStore(first.ip, first.port, timeout=STORE_TIMEOUT)
            store = PrefixStore(f"round-{generation}", theirs)
            if not self._check_hosts(store, members):
                return None
            place = self._place_of_workers_store(store, rank, generation)
        except DistError:
            if not self._wait_for_next(generation):
                raise
            return None
        if place is None:
            return None
        self._round, self._began_s = generation, time.monotonic()
        _log.info("rendezvous", round=generation, node_rank=rank, nodes=world_size)
        return RendezvousInfo(store, rank, world_size, place)

    def _wait_for_next(self, generation: int) -> bool:
        """Says whether the members have changed, as soon as the coordinator can know it."""
        until_s = time.monotonic() + LOST_S
        while not self._is_over(generation):
            if time.monotonic() > until_s:
                return False
            time.sleep(LOOK_S)
        return True

    def _check_hosts(self, store: Store, members: Sequence[MemberAddress]) -> bool:
        """Says whether the round can begin: no host is broken. One that is leaves, and the others meet again."""
        if self._check_factor is None:
            return True
        # Not before it is needed: it imports what the workers import too.
        from strata.coord.worker.torch_host_check import HostRound, check_hosts

        node, generation = self._joined(), self._joined().generation
        found = HostRound(
            store=store,
            address=(members[0].ip, members[0].port),
            name=f"round-{generation}",
            rank=node.rank,
            size=len(members),
            is_over=lambda: self._is_over(generation),
        )
        convicted = check_hosts(found, self._check_factor)
        if not convicted:
            return convicted is not None
        self._excluded = [f"{_host(members[rank])} was excluded: {reason}" for rank, reason in convicted.items()]
        for line in self._excluded:
            # In the event itself: torchrun has configured no logs, and prints nothing else.
            _log.warning(f"host_excluded {line}")
        if found.rank in convicted:
            self._refuse(f"{_host(members[found.rank])}, this host, was excluded: {convicted[found.rank]}")
        if not self._wait_for_next(generation):
            raise StrataError(Code.DEADLINE, f"an excluded host did not leave in {LOST_S:g} s: {self._excluded[0]}")
        return False

    def _refuse(self, reason: str) -> NoReturn:
        if self._refusal_file is not None:
            self._refusal_file.write_text(reason, encoding="utf-8")
        raise StrataError(Code.PRECONDITION, reason)

    def _place_of_workers_store(self, store: Store, rank: int, generation: int) -> RendezvousStoreInfo | None:
        """None: the members changed meanwhile."""
        if rank == 0:
            self._workers_store = _listen(self._ip)
            store.set("workers", f"{self._ip} {self._workers_store.port}")
        until_s = time.monotonic() + STORE_TIMEOUT.seconds
        # The node of rank 0 may have seen a change before it set this: then nobody ever does.
        while not store.check(["workers"]) and time.monotonic() < until_s:
            if self._is_over(generation):
                return None
            time.sleep(LOOK_S)
        ip, port = store.get("workers").decode().split()
        return RendezvousStoreInfo(ip, int(port))

    def num_nodes_waiting(self) -> int:
        """More than 0 makes torchrun start its workers again: nodes came or went, or workers of another one failed."""
        return int(self._is_round_over())

    def _is_round_over(self) -> bool:
        """A node that was cut off and evicted has a newer generation itself once it is back."""
        return self._is_over(self._round)

    def _is_over(self, generation: int) -> bool:
        node = self._joined()
        return node.is_stale or node.generation != generation

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """A job whose data is consumed refuses workers: nothing has to be closed here."""

    def shutdown(self) -> bool:
        """torchrun calls it also while an error ends it, with the same exit status as for workers that failed."""
        error = sys.exception()
        if self._failure_file is not None and error is not None and _may_pass(error):
            with suppress(OSError):
                self._failure_file.write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
        self._leave()
        return True

    def _leave(self) -> None:
        self._node = None
        self._stack.close()

    def _joined(self) -> Worker:
        assert self._node is not None
        return self._node


def _may_pass(error: BaseException) -> bool:
    """Says whether another rendezvous may succeed: a node died in mid-round, or the coordinator could not be
    reached."""
    cause = error.__cause__
    return isinstance(error, DistError) or (isinstance(cause, StrataError) and cause.code is Code.UNAVAILABLE)


def _file(parameters: RendezvousParameters, name: str) -> Path | None:
    """A path with a comma would end the setting: it is quoted."""
    path = unquote(str(parameters.get(name, "")))
    return Path(path) if path else None


def _host(member: MemberAddress) -> str:
    return f"{member.hostname} ({member.ip})"


async def _count_members(settings: WorkerSettings) -> int:
    link = CoordinatorLink(settings, "", SystemClock())
    within = Deadline(ATTEMPT_S, settings.patience_s)
    try:
        job = (await link.call(lambda stub: stub.GetJob, pb.GetJobRequest(history_limit=1), within)).job
    except StrataError as error:
        if error.code is not Code.NOT_FOUND:
            raise
        return 0
    finally:
        await link.close()
    return sum(each.liveness in (pb.LIVENESS_ALIVE, pb.LIVENESS_SUSPECT) for each in job.workers)


def _listen(ip: str) -> TCPStore:
    """A store that this process serves, on one address: left to itself, torch would listen on all."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    listener = socket.create_server((ip, 0), family=family, backlog=128)
    port = listener.getsockname()[1]
    # The store closes it.
    return TCPStore(
        ip, port, is_master=True, wait_for_workers=False, timeout=STORE_TIMEOUT, master_listen_fd=listener.detach()
    )


def _address_towards(endpoint: str) -> str:
    """The address of this host that the coordinator sees, and so do the other nodes. Nothing is sent."""
    host, _, port = endpoint.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    family, kind, _, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _check_time(deadline_s: float, reason: str) -> None:
    if time.monotonic() > deadline_s:
        raise StrataError(Code.DEADLINE, reason)
