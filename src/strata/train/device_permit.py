"""The permit to start on devices that ranks and engines share in turns: a file that the orchestrator writes. Who starts
ranks or engines waits for it.

A process that starts is awake. So the orchestrator takes the permit back before it asks a side to sleep: what confirms
that after it was alive then, and what is started later finds no permit.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final, Literal

import msgspec

from strata.base import log
from strata.base.atomic import read_json, write_json
from strata.base.errors import StrataError
from strata.train.settings import ServerSettings

POLL_S: Final = 0.1
_log = log.get(__name__)


class DevicePermit(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    """The number of the turn, or of the request of the next one."""
    side: Literal["", "ranks", "engines"]
    """Whose processes may start; empty: none, the devices pass from one side to the other."""


def permit_file(settings: ServerSettings) -> Path:
    return settings.sockets / "devices.json"


def read_permit(settings: ServerSettings) -> DevicePermit | None:
    """None if there is no permit that can be read: nothing may start then."""
    try:
        return read_json(permit_file(settings), DevicePermit)
    except (StrataError, OSError) as error:
        _log.warning("device_permit_unreadable", reason=str(error))
        return None


def write_permit(settings: ServerSettings, permit: DevicePermit) -> None:
    write_json(permit_file(settings), permit)


def wait_to_start_ranks(settings: ServerSettings) -> None:
    """Returns when ranks may start on the devices; at once if they take no turns."""
    if not settings.inference.takes_turns:
        return
    _log.info("ranks_wait_for_devices")
    while (permit := read_permit(settings)) is None or permit.side != "ranks":
        time.sleep(POLL_S)
    _log.info("ranks_may_start", permit=permit.number)
