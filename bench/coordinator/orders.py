"""What the bench tells its load process to do, one JSON line each, and what comes back."""

from __future__ import annotations

import msgspec


class Join(msgspec.Struct, frozen=True, tag=True):
    """Register workers w0, w1, … of a job, all at once. Figures: seconds until each has a place, calls it took."""

    address: str
    job: str
    workers: int
    channels: int


class Define(msgspec.Struct, frozen=True, tag=True):
    """Register the dataset that shards come from. No figures."""

    address: str
    job: str
    shards: int


class Teach(msgspec.Struct, frozen=True, tag=True):
    """Make the real calls once and have the bare server give their answers from now on. Figures: sizes in bytes."""

    ours: str
    bare: str
    """Empty: only the sizes are asked for."""
    job: str
    batch: int


class Heartbeats(msgspec.Struct, frozen=True, tag=True):
    """Every worker sends a heartbeat after the other. Figures: calls a second."""

    address: str
    job: str
    seconds: float


class Batches(msgspec.Struct, frozen=True, tag=True):
    """Every host sends the heartbeats of its workers in one call, again and again. Figures: beats a second."""

    address: str
    job: str
    seconds: float
    batch: int


class Shards(msgspec.Struct, frozen=True, tag=True):
    """Every worker takes a shard, acks it with the next call, and so on. Figures: calls a second."""

    address: str
    job: str
    seconds: float


class Offered(msgspec.Struct, frozen=True, tag=True):
    """The same at a given rate. Figures: p50 and p99 in ms, from when a call was due, and the rate reached."""

    address: str
    job: str
    seconds: float
    rate: float


class Meet(msgspec.Struct, frozen=True, tag=True):
    """All workers enter one barrier. Figures: ms from the last one's call to the p50, p99 and last release."""

    address: str
    job: str
    workers: int
    channels: int


class Hosts(msgspec.Struct, frozen=True, tag=True):
    """Each worker sends a heartbeat in every interval, through the relay of its host or directly.

    Figures: heartbeats and calls a second that the coordinator gets, and the ms of processor time that they cost it.
    """

    address: str
    job: str
    hosts: int
    workers: int
    interval_s: float
    pid: int
    """Of the coordinator."""
    relayed: bool


class Beats(msgspec.Struct, frozen=True, tag=True):
    """Heartbeats of all workers in turn at a rate. Figures: p50 and p99 in ms, CPU of `pid` in %, the rate reached."""

    address: str
    job: str
    workers: int
    channels: int
    rate: float
    seconds: float
    pid: int


class Watch(msgspec.Struct, frozen=True, tag=True):
    """Watch a job. Figures: responses a second, MiB a second."""

    address: str
    job: str
    watchers: int
    seconds: float
    deltas: bool


Order = Hosts | Join | Define | Teach | Heartbeats | Batches | Shards | Offered | Meet | Beats | Watch
