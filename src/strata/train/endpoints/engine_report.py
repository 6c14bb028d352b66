"""The file in which the launcher reports the condition of a supervised engine, and how the orchestrator reads it."""

from __future__ import annotations

from typing import Literal

import msgspec

from strata.base.atomic import read_json
from strata.base.errors import StrataError
from strata.train.settings import ServerSettings
from strata.train.status.reports import EngineStatus

EngineCondition = Literal["waiting", "starting", "ready", "restarting"]


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    condition: EngineCondition
    reason: str
    starts: int
    since_s: float
    permit: int | None = None
    """The number of the permit under which it waits to start."""


def read_report(settings: ServerSettings, name: str) -> EngineReport | None:
    """None if no launcher supervises this engine."""
    return read_json(settings.engine_report(name), EngineReport)


def engine_statuses(settings: ServerSettings) -> list[EngineStatus]:
    """Reads the status of all engines that the server starts. A file that cannot be read is a state too, and no error
    of the status."""
    return [_status(settings, name) for name in settings.inference.engines]


def _status(settings: ServerSettings, name: str) -> EngineStatus:
    try:
        report = read_report(settings, name)
    except (StrataError, OSError) as error:
        return EngineStatus(name=name, state="unknown", reason=str(error))
    if report is None:
        return EngineStatus(name=name, state="unknown", reason="no launcher supervises it")
    return EngineStatus(
        name=name, state=report.condition, reason=report.reason, starts=report.starts, since_s=report.since_s
    )
