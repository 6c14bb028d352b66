"""Samples of hosts and the fleet in memory until the next write, their roll-up every 60 s, and the points of a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from strata.fleet.core.samples import FLEET, HostSample, SamplePoint, finest
from strata.fleet.service.state import FleetState

ROLL_UP_S: Final = 60.0


class SampleService:
    def __init__(self, state: FleetState) -> None:
        self._state = state
        self._store = state.store
        self._points: list[SamplePoint] = []
        self._newest: dict[str, Mapping[str, float]] = {}
        self._rolled_up_at_s = float("-inf")

    def add(self, host_id: str, sample: HostSample) -> None:
        """Written once a second; one that is lost with the hub is no loss."""
        point = SamplePoint(host_id, self._state.now_s(), sample.values())
        self._points.append(point)
        self._newest[host_id] = point.values

    def add_fleet(self, values: Mapping[str, float]) -> None:
        """Figures of the whole fleet, written with the samples of its hosts."""
        self._points.append(SamplePoint(FLEET, self._state.now_s(), values))

    def newest(self, host_id: str) -> Mapping[str, float]:
        return self._newest.get(host_id, {})

    async def read(self, host_id: str, span_s: float, points: int) -> tuple[int, Sequence[SamplePoint]]:
        """The step in which the last `span_s` are shown in so many points, and these."""
        step_s = finest(span_s, points)
        return step_s, (await self._store.samples.read(host_id, step_s, self._state.now_s() - span_s))[-points:]

    async def run_once(self) -> None:
        """Writes what hosts have sampled since the last time; once a minute also means, and what is too old goes."""
        points, self._points = self._points, []
        if points:
            await self._store.samples.record(points)
        now_s = self._state.now_s()
        if now_s - self._rolled_up_at_s >= ROLL_UP_S:
            self._rolled_up_at_s = now_s
            await self._store.samples.roll_up(now_s)
            await self._store.statistics.compact_counts()
