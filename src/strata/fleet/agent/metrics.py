"""The agent's Prometheus metrics, `strata_agent_…`: names, help texts, and the endpoint, on loopback and for callers
with its token.

The library for Prometheus is imported when the endpoint is opened: a base install does without.
"""

from __future__ import annotations

import hmac
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from strata.base import log
from strata.base.atomic import create_file
from strata.base.errors import Code, StrataError
from strata.base.loopback import is_loopback_address
from strata.base.secret import Secret, read_secret
from strata.fleet.agent.settings import AgentSettings
from strata.fleet.core.samples import CardSample, HostSample

if TYPE_CHECKING:
    from prometheus_client.core import Metric

PREFIX: Final = "strata_agent_"
TOKEN_FILE: Final = "metrics.token"  # noqa: S105 - the name of a file
GIB: Final = 1024**3
_log = log.get(__name__)


@dataclass
class AgentCounts:
    """What the agent counts while it works, and what it sampled last."""

    claims: Counter[str] = field(default_factory=Counter)
    """Claims by outcome: granted, empty, failed."""
    heartbeats: Counter[str] = field(default_factory=Counter)
    """Heartbeats by outcome: answered, failed."""
    leases: int = 0
    attempts: Counter[str] = field(default_factory=Counter)
    """Ended attempts by outcome: completed, or the cause."""
    running: int = 0
    claims_paused: bool = False
    sample: HostSample = field(default_factory=HostSample)


@asynccontextmanager
async def expose_metrics(settings: AgentSettings, counts: AgentCounts) -> AsyncIterator[str]:
    """Serve the metrics where the settings say so. Gives their URL, empty if they are not served."""
    if not settings.metrics_listen:
        yield ""
        return
    if not is_loopback_address(settings.metrics_listen):
        raise StrataError(
            Code.INVALID,
            f"agent.metrics_listen: {settings.metrics_listen} can be reached from other machines",
            hint="listen on 127.0.0.1; a Prometheus of this host scrapes it there",
        )
    try:
        from prometheus_client import generate_latest

        from strata.http.metrics import process_registry, serve_metrics
    except ModuleNotFoundError as error:
        raise StrataError(
            Code.UNSUPPORTED, "agent.metrics_listen needs prometheus-client", hint="pip install 'strata-train[agent]'"
        ) from error
    registry = process_registry(PREFIX)
    registry.register(AgentCollector(counts))
    token = settings.metrics_token or _token(settings)

    def check(authorization: str) -> None:
        if not hmac.compare_digest(authorization.encode(), f"Bearer {token.reveal()}".encode()):
            raise StrataError(Code.UNAUTHENTICATED, "the metrics of this agent need its token")

    async with serve_metrics(settings.metrics_listen, lambda: generate_latest(registry), check) as url:
        _log.info("metrics_served", url=url)
        yield url


def _token(settings: AgentSettings) -> Secret:
    """The one in the state folder, made at the first start."""
    path = settings.state_folder / TOKEN_FILE
    if not path.exists():
        create_file(path, f"{secrets.token_hex(24)}\n".encode())
    return read_secret(path)


class AgentCollector:
    """Makes the series from the counts at each scrape."""

    def __init__(self, counts: AgentCounts) -> None:
        self._counts = counts

    def collect(self) -> Iterable[Metric]:
        counts, sample = self._counts, self._counts.sample
        yield _counter("claims_total", "Claims, by outcome", counts.claims, "outcome", ("granted", "empty", "failed"))
        yield _counter(
            "heartbeats_total", "Heartbeats, by outcome", counts.heartbeats, "outcome", ("answered", "failed")
        )
        yield _counter("leases_total", "Leases that this host got", {"": counts.leases})
        yield _counter("attempts_total", "Attempts that have ended, by outcome", counts.attempts, "outcome")
        yield _gauge("attempts_open", "Attempts that this host has now", counts.running)
        yield _gauge("claims_paused", "1 while nothing is claimed: the disk is full, or a person uses the machine",
                     float(counts.claims_paused))  # fmt: skip
        yield _gauge("cpu_use_ratio", "Share of the time in which the processors computed", sample.cpu_use)
        for name, text, gib in (
            ("memory_used_bytes", "Memory in use on this host", sample.ram_used_gib),
            ("disk_free_bytes", "Free space below the work folder", sample.disk_free_gib),
            ("environment_cache_bytes", "Size of the environments that are kept", sample.environments_gib),
            ("data_cache_bytes", "Size of the datasets that are kept", sample.data_gib),
        ):
            yield _gauge(name, text, None if gib is None else gib * GIB)
        yield _cards("gpu_use_ratio", "Share of the time in which the GPU computed", sample, lambda card: card.use)
        yield _cards("gpu_memory_used_bytes", "Memory in use on the GPU", sample,
                     lambda card: None if card.vram_used_gib is None else card.vram_used_gib * GIB)  # fmt: skip
        yield _cards("gpu_temperature_celsius", "Temperature of the GPU", sample, lambda card: card.temperature_c)
        yield _cards("gpu_power_watts", "Power that the GPU draws", sample, lambda card: card.power_w)


def _counter(name: str, text: str, counts: Mapping[str, int], label: str = "", known: Iterable[str] = ()) -> Metric:
    from prometheus_client.core import CounterMetricFamily

    family = CounterMetricFamily(f"{PREFIX}{name}", text, labels=[label] if label else [])
    for value in dict.fromkeys((*known, *counts)):
        family.add_metric([value] if label else [], counts.get(value, 0))
    return family


def _gauge(name: str, text: str, value: float | None) -> Metric:
    from prometheus_client.core import GaugeMetricFamily

    family: Any = GaugeMetricFamily(f"{PREFIX}{name}", text)
    if value is not None:
        family.add_metric([], value)
    return family  # type: ignore[no-any-return]


def _cards(name: str, text: str, sample: HostSample, read: Callable[[CardSample], float | None]) -> Metric:
    from prometheus_client.core import GaugeMetricFamily

    family = GaugeMetricFamily(f"{PREFIX}{name}", text, labels=["gpu"])
    for card in sample.cards:
        value = read(card)
        if value is not None:
            family.add_metric([card.card], value)
    return family
