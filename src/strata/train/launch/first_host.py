"""The first host of a server on several: it hears the reports of all hosts, sends them orders, and has the files.

What is ordered, `HostPlan` decides. This host's own ranks follow it without a network.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from strata import __version__
from strata.base import log
from strata.base.atomic import write_json
from strata.base.clock import Clock
from strata.base.errors import Code, StrataError
from strata.train.checkpoints.checkpoint import CheckpointFile, digest_files
from strata.train.hugging_face import PULLED, find_folder
from strata.train.launch.host_ranks import REPORT_S, HostRanks, hosts_command
from strata.train.launch.supervised_process import ProcessCommand
from strata.train.link.host_files import FileService
from strata.train.link.hosts import HostOrder, HostSettings, HostsListener, Plain
from strata.train.link.keys import make_keys, read_keys
from strata.train.plan.host_plan import HostEvent, HostPlan, HostReport, HostRules
from strata.train.settings import ServerSettings

OWN: Final = "first host"
SECTIONS: Final = ("model", "ranks", "sampling", "parallel")
"""What the ranks of other hosts need of the settings; no section with a secret."""
KEYS_FILE: Final = "hosts.keys"
"""A file in the data folder: the keys of the port on which hosts join."""
INVITE_FILE: Final = "hosts.invite"
"""Another one: the part of those keys that a host needs to join."""
PREPARE_WAITS: Final = 5
"""Hosts that still get the model are waited for so many times as long as others, and for at most half of the time after
which the server gives its ranks up."""
TICK_S: Final = 0.2
STALL_S: Final = 1.0
"""When this process itself stood still for longer, no host was silent meanwhile."""
_log = log.get(__name__)


class FirstHost:
    """Stands in the place of the ranks' process of a single machine."""

    def __init__(self, settings: ServerSettings, ranks: ProcessCommand, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._run = secrets.token_hex(8)
        address, _, self._port = settings.hosts.listen.rpartition(":")
        rules = HostRules(
            own=OWN,
            run=self._run,
            address=address,
            data=str(settings.data),
            nproc=settings.by_device.nproc,
            parallel=settings.parallel,
            count=settings.hosts.count,
            wait_s=settings.hosts.wait_s,
            prepare_s=min(PREPARE_WAITS * settings.hosts.wait_s, settings.ranks.start_timeout_s / 2),
            lost_after_s=settings.hosts.lost_after_s,
            grow_after_s=settings.hosts.grow_after_s,
        )
        self._plan = HostPlan(rules)
        self._changed = asyncio.Event()
        command = hosts_command(ranks, address, "--address", address)
        self._ranks = HostRanks(command, clock, self._changed.set)
        self._model: Mapping[str, CheckpointFile] | None = None
        self._listener: HostsListener | None = None
        self._stopping = False
        self._stalled_s = 0.0
        """How long this process stood still in all."""
        self.name = self._ranks.process.command.name

    async def supervise(self) -> None:
        """Run until stopped."""
        file = self._settings.data / KEYS_FILE
        if not file.exists():
            make_keys(file)
        keys = read_keys(file)
        write_json(self._settings.data / INVITE_FILE, keys.of_clients)
        roots: Mapping[Any, Path] = {
            "model": self._model_folder,
            "snapshots": self._settings.snapshot_folder,
            "checkpoints": self._settings.checkpoint_folder,
        }
        files = FileService(
            HostSettings(self._run, ranks_settings(self._settings), str(self._model_folder.absolute())),
            roots,
            self._model_files,
            lambda run, generation: run == self._run and generation == self._plan.generation,
            self._settings.by_device.nproc,
        )
        self._listener = HostsListener(f"tcp://{self._settings.hosts.listen}", keys, self._on_report, files.answer)
        tasks = [
            asyncio.create_task(self._ranks.process.supervise()),
            asyncio.create_task(self._listener.run()),
            asyncio.create_task(self._decide()),
            asyncio.create_task(self._read_model()),
        ]
        waiting: set[asyncio.Task[None]] = set(tasks)
        try:
            # Its end is the end of all; that of reading the model is not, unless it failed.
            while not tasks[0].done():
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            self._listener.close()

    @property
    def _model_folder(self) -> Path:
        folder = find_folder(self._settings.model.path)
        if folder is None:
            raise StrataError(Code.INVALID, f"there is no model in {self._settings.model.path}")
        return folder

    async def _read_model(self) -> None:
        folder = self._model_folder
        paths = {path for pattern in PULLED for path in folder.glob(pattern) if path.is_file()}
        self._model = await asyncio.to_thread(digest_files, paths)

    def _model_files(self) -> Mapping[str, CheckpointFile]:
        if self._model is None:
            raise StrataError(Code.UNAVAILABLE, "the digests of the model's files are being computed")
        return self._model

    def _on_report(self, report: HostReport) -> HostOrder:
        if report.version != __version__:
            return self._order(report.name, refused=f"it runs strata {report.version}, the first host {__version__}")
        if report.name == OWN:
            return self._order(report.name, refused="that is the name of the first host")
        refused = self._plan.report(report, self._now_s())
        self._changed.set()
        return self._order(report.name, refused)

    def _order(self, host: str, refused: str = "") -> HostOrder:
        ranks = None if refused else self._plan.order(host)
        return HostOrder(self._run, ranks, self._settings.hosts.lost_after_s, refused)

    async def _decide(self) -> None:
        """Decide whenever something is reported, and when time has passed."""
        told: set[str] = set()
        last_s = self._now_s()
        while True:
            self._changed.clear()
            if (gap_s := self._now_s() - last_s) > STALL_S:
                self._stalled_s += gap_s
            last_s = now_s = self._now_s()
            self._plan.report(self._ranks.report(OWN, self._run, __version__, self._run), now_s)
            events = () if self._stopping else self._plan.decide(now_s)
            for event in events:
                _report_event(event)
            if not self._stopping:
                self._ranks.follow(self._plan.order(OWN))
            assert self._listener is not None
            if any(event.kind in ("started", "over") for event in events):
                for host in {*told, *self._plan.hosts} - {OWN}:
                    if not self._listener.order(host, self._order(host)):
                        self._plan.gone(host)
                        self._changed.set()
                told = set(self._plan.hosts)
            try:
                async with asyncio.timeout(TICK_S):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _now_s(self) -> float:
        return self._clock.monotonic_s() - self._stalled_s

    def ranks_attached(self) -> None:
        self._plan.ranks_attached()

    def snapshot_committed(self) -> None:
        self._plan.snapshot_committed(self._now_s())
        self._changed.set()

    def kill(self) -> None:
        """End the ranks of all hosts; others start."""
        self._plan.stuck(self._now_s())
        self._changed.set()

    def disable_restart(self) -> None:
        """Start no generation any more. The ranks that run end by a shutdown of the orchestrator."""
        self._stopping = True

    async def stop(self, grace_s: float, *, after_s: float) -> None:
        deadline_s = self._clock.monotonic_s() + after_s
        while self._ranks.report(OWN, "", "", "").running and self._clock.monotonic_s() < deadline_s:
            self._changed.clear()
            try:
                async with asyncio.timeout(REPORT_S):
                    await self._changed.wait()
            except TimeoutError:
                continue
        if self._listener is not None:
            for host in self._plan.hosts:
                self._listener.order(host, HostOrder(self._run, None, self._settings.hosts.lost_after_s))
        await self._ranks.process.stop(grace_s)


def ranks_settings(settings: ServerSettings) -> dict[str, dict[str, Plain]]:
    """Returns the settings that the ranks of other hosts read. Each of these sections has plain values only."""
    sections = {section: msgspec.structs.asdict(getattr(settings, section)) for section in SECTIONS}
    # The name may come from a path that other hosts do not have.
    sections["model"] |= {"name": settings.model.base_model, "tokenizer_id": settings.model.tokenizer}
    del sections["model"]["path"], sections["ranks"]["rank0"]
    return {
        section: {name: value for name, value in values.items() if value is not None}
        for section, values in sections.items()
    }


def _report_event(event: HostEvent) -> None:
    match event.kind:
        case "joined":
            _log.info("host_joined", host=event.host)
        case "lost":
            _log.warning("host_lost", host=event.host, reason=event.reason)
        case "barred":
            _log.error("host_barred", host=event.host, reason=event.reason)
        case "started":
            _log.info("generation_started", generation=event.generation, hosts=list(event.hosts))
        case "over":
            _log.warning("generation_over", generation=event.generation, reason=event.reason)
        case "unplaced":
            _log.error("hosts_form_no_mesh", hosts=list(event.hosts), reason=event.reason)
