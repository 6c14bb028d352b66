"""The ranks of this host in a server on several: the process that forks those of the generation that is ordered, and
what a report says of it. The first host and those that joined run it alike.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Callable
from typing import Final

import msgspec

from strata.base import log
from strata.base.clock import Clock
from strata.base.errors import Code, StrataError
from strata.train.launch.supervised_process import EVENTS, ProcessCommand, SupervisedProcess
from strata.train.plan.host_plan import HostReport, RankGeneration

REPORT_S: Final = 1.0
"""How often a host reports; at once when something changes."""
_GET_ADDRESS: Final = 0x8915
"""SIOCGIFADDR: asks the kernel for the IPv4 address of an interface."""
_log = log.get(__name__)


class HostRanks:
    """`on_change` is called whenever the report changes."""

    def __init__(self, command: ProcessCommand, clock: Clock, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._ordered: RankGeneration | None = None
        self._prepared, self._port = False, 0
        self._running = self._ended = self._status = 0
        self.process = SupervisedProcess(command, clock, self._on_event, self._on_start)

    def follow(self, order: RankGeneration | None) -> None:
        """Let the ranks of this generation run, and no others."""
        if order != self._ordered:
            self._ordered = order
            self.process.write(msgspec.json.encode(order))

    def report(self, name: str, incarnation: str, version: str, run: str) -> HostReport:
        return HostReport(
            name=name,
            incarnation=incarnation,
            version=version,
            run=run,
            prepared=self._prepared,
            running=self._running,
            ended=self._ended,
            status=self._status,
            port=self._port,
        )

    def _on_start(self) -> None:
        if self._running:
            # The process died, and its ranks with it.
            self._ended, self._status, self._running = self._running, 1, 0
        self._prepared = False
        self._on_change()

    def _on_event(self, event: str) -> None:
        match event.split():
            case ["prepared", port]:
                self._prepared, self._port = True, int(port)
                self.process.was_ready = True
                self.process.write(msgspec.json.encode(self._ordered))
            case ["running", number]:
                self._running = int(number)
                _log.info("generation_running", generation=self._running)
            case ["ended", number, status]:
                self._running, self._ended, self._status = 0, int(number), int(status)
                _log.info("generation_ended", generation=self._ended, status=self._status)
            case _:
                _log.warning("unknown_ranks_event", event_line=event)
        self._on_change()


def hosts_command(ranks: ProcessCommand, address: str, *arguments: str) -> ProcessCommand:
    """Returns the command for the ranks of this host as one of several, from that for those of a single machine.
    `address` is that of this host: the ranks speak on its interface."""
    interface = interface_of(address)
    variables = {"GLOO_SOCKET_IFNAME": interface, "TP_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    return ProcessCommand(
        ranks.name,
        (*ranks.arguments, "--events-fd", EVENTS, *arguments),
        {**ranks.environment, **variables},
        reads_orders=True,
    )


def interface_of(address: str) -> str:
    """INVALID if no interface of this host has the address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    raise StrataError(Code.INVALID, f"no interface of this host has the address {address}")


def own_address_towards(address: str) -> str:
    """Returns the address of this host from which it reaches another."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Connecting a datagram socket sends nothing: it only looks up the route.
            probe.connect((address, 9))
        except OSError as error:
            raise StrataError(Code.UNAVAILABLE, f"there is no route to {address}: {error.strerror}") from error
        return str(probe.getsockname()[0])
