"""The load on the hub of a campaign: simulated hosts, an operator, a listener of the feed and a webhook receiver."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

from soak.fleet_hub import audit
from soak.fleet_hub.clients import Listener, Operator
from soak.fleet_hub.expected_state import ExpectedState
from soak.fleet_hub.hosts import HOLDER, HostBehaviour, SimulatedHost
from soak.hub_process import HubProcess
from soak.trials import CampaignResult
from strata.base.secret import Secret
from strata.fleet.wire.identities import LocalHostReply, LocalHostRequest
from tests.support.webhook_receiver import WebhookReceiver

T = TypeVar("T")

LEASE_S: Final = 6.0
"""Long beside a restart, short beside the outages of a campaign."""
HOOK_KINDS: Final = ("job.completed", "job.failed", "job.cancelled")
SEEDS_PER_TRIAL: Final = 1_000_000
"""Jobs of one trial at most: a campaign that goes on never meets a job of the one before."""


@dataclass
class Outcome:
    """The result fields that both campaigns share."""

    times: int = 0
    problems: list[str] = field(default_factory=list)
    counted: dict[str, int] = field(default_factory=dict)

    def counts(self) -> str:
        return ", ".join(f"{count} {what}" for what, count in self.counted.items())

    def result(self) -> CampaignResult:
        raise NotImplementedError


def settings(folder: Path, receiver: WebhookReceiver) -> Path:
    """The settings file of the hub, for settings that no environment variable can hold."""
    path = folder / "hub.toml"
    kinds = ", ".join(f'"{kind}"' for kind in HOOK_KINDS)
    hook = f'url = "{receiver.url}", secret = "{secrets.token_hex(16)}", kinds = [{kinds}], allow = ["127.0.0.0/8"]'
    path.write_text(f"[hub]\nstale_after_s = {LEASE_S}\nwebhooks = [{{ {hook} }}]\n", encoding="utf-8")
    path.chmod(0o600)
    return path


class Workers:
    """All clients of the hub under test: they join once the hub answers, and work until they are closed."""

    def __init__(
        self, hub: HubProcess, receiver: WebhookReceiver, hosts: int, rng: random.Random, first_seed: int
    ) -> None:
        self._hub = hub
        self._count = hosts
        self._rng = rng
        self._first_seed = first_seed
        self.expected = ExpectedState()
        self.hosts: list[SimulatedHost] = []
        self.host_ids: dict[str, str] = {}
        self.receiver = receiver
        self._since = ("", 0)
        """The position of the feed when the round began: its cursor, and how many events the listener had received."""

    async def rounds(
        self, trials: Sequence[T], per_round: int, do: Callable[[Sequence[T]], Awaitable[None]], outcome: Outcome
    ) -> AsyncIterator[CampaignResult]:
        """Let `do` inject faults round by round while all clients work; audit the hub after each round.

        A round that showed a problem at once is the last, and is not counted.
        """
        try:
            await self._hub.first_start()
            await self.join()
            for begin in range(0, len(trials), per_round):
                now = trials[begin : begin + per_round]
                self._work()
                await do(now)
                if not self.expected.problems:
                    await self._drain_and_audit()
                    outcome.times += len(now)
                self._account(outcome)
                yield outcome.result()
                if outcome.problems:
                    break
        finally:
            await self.close()
            await self._hub.close()
            self._account(outcome)

    def _account(self, outcome: Outcome) -> None:
        outcome.problems = [*self.expected.problem_lines(), *self._hub.crashes]
        outcome.counted = dict(sorted(self.expected.counted.items()))

    async def join(self) -> None:
        await asyncio.to_thread(self._join)

    def _join(self) -> None:
        with self._hub.operator() as operator:
            for number in range(self._count):
                name = f"host{number}"
                made = operator.call("POST", "/v1/hosts/local", LocalHostReply, body=LocalHostRequest(name=name))
                self.host_ids[name] = made.host_id
                behaviour = HOLDER if number % 4 == 0 else HostBehaviour(count=1 + number % 3)
                rng = random.Random(self._rng.random())  # noqa: S311 - no secret
                login = (name, Secret(made.secret))
                self.hosts.append(
                    SimulatedHost(self._hub.address, login, self.expected, behaviour, lease_s=LEASE_S, rng=rng)
                )
        rng = random.Random(self._rng.random())  # noqa: S311 - no secret
        backlog = 4 * self._count
        self.operator = Operator(self._hub.operator(), self.expected, rng, self._first_seed, backlog)
        self.listener = Listener(self._hub.operator(), self.expected)
        self.listener.start()
        for host in self.hosts:
            host.start()
        self.operator.start()

    def _work(self) -> None:
        self.operator.draining.clear()
        self.operator.drained.clear()
        for host in self.hosts:
            host.draining.clear()

    async def _drain_and_audit(self) -> None:
        """Let all jobs end, audit the hub, and start the next round with an empty expected state."""
        self.operator.draining.set()
        for host in self.hosts:
            host.draining.set()
        await asyncio.to_thread(self._audit)

    def _audit(self) -> None:
        expected, listener = self.expected, self.listener
        with self._hub.operator() as client:
            audit.drain(client, expected, self._idle)
            listener.caught_up()
            cursor, heard = self._since
            events = listener.events[heard:]
            audit.audit(client, expected, self.host_ids, events)
            audit.check_feed(client, expected, events, cursor)
            wanted = [event.cursor for event in events if event.kind in HOOK_KINDS]
            audit.check_webhook(expected, wanted, self.receiver.cursors)
        self._since = (listener.cursor, len(listener.events))
        expected.close_round()

    def _idle(self) -> bool:
        return self.operator.drained.is_set() and all(host.idle for host in self.hosts)

    async def close(self) -> None:
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        everybody: list[SimulatedHost | Operator | Listener] = [*self.hosts]
        if self.hosts:
            everybody += [self.operator, self.listener]
        for each in everybody:
            each.stop()
        for each in everybody:
            each.join()
