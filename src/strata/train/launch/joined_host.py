"""`strata serve --join`: this host has ranks of a server that runs on another one. It gets the settings and the model
from there, reports every second, follows orders, and ends its ranks when it hears nothing (`hosts.lost_after_s`).

It keeps the model and nothing else. A first host that starts again is another run: everything is prepared again, and
what is there with the right digest is not fetched twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from strata import __version__
from strata.base import log
from strata.base.atomic import write_file
from strata.base.clock import Clock, SystemClock
from strata.base.errors import Code, StrataError
from strata.base.private import require_private_folder, set_private_umask
from strata.base.retry import Backoff, RetryPolicy, no_jitter, retry
from strata.base.settings import process_environment
from strata.train.launch.host_ranks import REPORT_S, HostRanks, hosts_command, own_address_towards
from strata.train.launch.launcher import lock_folder, rank_command
from strata.train.launch.supervised_process import ProcessCommand
from strata.train.link.host_files import fetch_files, list_files, remove_others, right_files
from strata.train.link.hosts import FirstHostClient, Folder, GetSettings, HostLink, HostSettings, Plain
from strata.train.link.keys import ClientKeys, read_invite
from strata.train.plan.defaults import resolve_settings
from strata.train.plan.devices import read_machine
from strata.train.plan.host_plan import HostReport
from strata.train.plan.model_files import find_model_files
from strata.train.settings import load_settings

STOP_S: Final = 5.0
SILENT_S: Final = 10.0
"""How often a warning says that no order came for so long."""
SETTINGS_FILE: Final = "joined.toml"
SETTINGS_PREFIX: Final = "STRATA_"
_MODEL: Final = Folder("model")
_log = log.get(__name__)


def run_joined_host(address: str, invite: Path, data: Path, announce: Callable[[str], None]) -> None:
    set_private_umask()
    data = data.expanduser().absolute()
    require_private_folder(data, "the model's files")
    keys = read_invite(invite)
    with lock_folder(data):
        asyncio.run(_run_until_signal(address, invite.absolute(), keys, data, announce))


async def _run_until_signal(
    address: str, invite: Path, keys: ClientKeys, data: Path, announce: Callable[[str], None]
) -> None:
    host = JoinedHost(address, invite, keys, data, SystemClock(), announce)
    running = asyncio.create_task(host.run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, running.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await running


class JoinedHost:
    def __init__(
        self, address: str, invite: Path, keys: ClientKeys, data: Path, clock: Clock, announce: Callable[[str], None]
    ) -> None:
        self._endpoint, self._invite, self._keys = f"tcp://{address}", invite, keys
        self._first_address = address.rpartition(":")[0]
        self._data = data
        self._clock = clock
        self._announce = announce
        self._name = f"{own_address_towards(self._first_address)}:{data}"
        self._incarnation = secrets.token_hex(8)
        self._run = ""
        """The run of the first host that the ranks' process was prepared for."""
        self._ranks: HostRanks | None = None
        self._changed = asyncio.Event()
        self._heard_s = clock.monotonic_s()
        self._warned_s = self._heard_s
        self._lost_after_s = 0.0
        self._work: asyncio.Task[None] | None = None
        """Prepares for the run of the first host, and then supervises the ranks' process."""

    async def run(self) -> None:
        """Run until cancelled. STALE if the first host refuses this one."""
        link = HostLink(self._endpoint, self._keys)
        tasks = [asyncio.create_task(self._follow(link)), asyncio.create_task(self._report(link))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await self._end_work()
            link.close()

    async def _follow(self, link: HostLink) -> None:
        while True:
            order = await link.receive()
            self._heard_s, self._lost_after_s = self._clock.monotonic_s(), order.lost_after_s
            if order.refused:
                raise StrataError(Code.STALE, f"the first host does not take this one: {order.refused}")
            if order.run != self._run:
                await self._end_work()
                self._run = order.run
                self._work = asyncio.create_task(self._prepare_and_supervise(order.run))
            elif self._ranks is not None:
                self._ranks.follow(order.ranks)

    async def _report(self, link: HostLink) -> None:
        while True:
            self._changed.clear()
            link.report(self._own_report())
            if self._ranks is not None and self._clock.monotonic_s() - self._heard_s > self._lost_after_s:
                # The others go on without this host.
                self._ranks.follow(None)
            self._warn_of_missing_orders()
            if self._work is not None and self._work.done():
                self._work.result()
            try:
                async with asyncio.timeout(REPORT_S):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _warn_of_missing_orders(self) -> None:
        """A wrong address, port or invite and an older version show in nothing but silence."""
        now_s = self._clock.monotonic_s()
        if now_s - max(self._heard_s, self._warned_s) >= SILENT_S:
            self._warned_s = now_s
            _log.warning(
                "first_host_silent",
                address=self._endpoint,
                hint="is the address right, and the invite of this server?",
            )

    def _own_report(self) -> HostReport:
        if self._ranks is None:
            return HostReport(name=self._name, incarnation=self._incarnation, version=__version__)
        return self._ranks.report(self._name, self._incarnation, __version__, self._run)

    async def _end_work(self) -> None:
        work, ranks = self._work, self._ranks
        self._work = self._ranks = None
        if ranks is not None:
            await ranks.process.stop(STOP_S)
        if work is not None:
            work.cancel()
            await asyncio.wait([work])

    async def _prepare_and_supervise(self, run: str) -> None:
        policy = RetryPolicy(
            backoff=Backoff(first_s=1.0, most_s=10.0), transient=frozenset({Code.UNAVAILABLE, Code.CORRUPT})
        )
        settings, folder = await retry(
            self._prepare,
            policy,
            clock=self._clock,
            chance=no_jitter,
            on_retry=lambda error, _: _log.warning("host_preparation_failed", reason=error.message),
        )
        if settings.run != run:
            # The first host started again meanwhile; the next order says so.
            return
        self._ranks = HostRanks(self._command(settings, folder), self._clock, self._changed.set)
        self._announce(f"joined {self._endpoint}; Ctrl-C leaves it")
        await self._ranks.process.supervise()

    async def _prepare(self) -> tuple[HostSettings, Path]:
        """Prepare in a thread, which has ended when this is over: the next one writes the same files."""
        stop = threading.Event()
        thread = asyncio.create_task(asyncio.to_thread(self._prepare_until, stop))
        try:
            return await asyncio.shield(thread)
        except OSError as error:
            raise StrataError(Code.UNAVAILABLE, str(error)) from error
        finally:
            stop.set()
            await asyncio.wait([thread])

    def _prepare_until(self, stop: threading.Event) -> tuple[HostSettings, Path]:
        """Get the settings, and the model's files unless this host has the same ones where the first host has them."""
        first = FirstHostClient(self._endpoint, self._keys, stop=stop)
        try:
            settings = first.request(GetSettings(), HostSettings)
            files = list_files(first, _MODEL)
            there = Path(settings.model)
            if there.is_dir() and right_files(there, files, first.check_stop) == files.keys():
                return settings, there
            target = self._data / "model"
            remove_others(target, files, first.check_stop)
            _log.info("model_fetching", bytes=sum(file.size for file in files.values()))
            fetch_files(first, _MODEL, files, target)
            return settings, target
        finally:
            first.close()

    def _command(self, settings: HostSettings, model: Path) -> ProcessCommand:
        """Returns the command of the ranks' process, whose settings are those of the first host and no others."""
        environment = {
            name: value for name, value in process_environment().items() if not name.startswith(SETTINGS_PREFIX)
        }
        sections: dict[str, Mapping[str, Plain]] = {**settings.sections, "server": {"data": str(self._data)}}
        sections["model"] = {**sections["model"], "path": str(model)}
        file = self._data / SETTINGS_FILE
        write_file(file, _toml(sections).encode())
        own = load_settings(file, environ=environment)
        resolution = resolve_settings(own, read_machine(environment), find_model_files(str(model)))
        return hosts_command(
            rank_command(resolution, file, environment),
            own_address_towards(self._first_address),
            "--first-host",
            self._endpoint,
            "--invite",
            str(self._invite),
        )


def _toml(sections: Mapping[str, Mapping[str, Plain]]) -> str:
    """Writes texts, numbers and truth values as JSON does: TOML reads them alike."""
    lines: list[str] = []
    for section, values in sections.items():
        lines.append(f"[{section}]")
        lines += [f"{name} = {msgspec.json.encode(value).decode()}" for name, value in values.items()]
    return "\n".join(lines) + "\n"
