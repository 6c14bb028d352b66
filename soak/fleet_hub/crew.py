"""Everybody who works with the hub of a campaign: hosts, an operator, a listener and a webhook's receiver."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

from soak.fleet_hub import audit
from soak.fleet_hub.books import Books
from soak.fleet_hub.hosts import HOLDER, Host, Temper
from soak.fleet_hub.people import Listener, Operator, Receiver
from soak.hub_process import HubProcess
from soak.trials import CampaignResult
from strata.base.secret import Secret
from strata.fleet import wire

T = TypeVar("T")

LEASE_S: Final = 6.0
"""Long beside a restart, short beside the outages of a campaign."""
HOOK_KINDS: Final = ("job.completed", "job.failed", "job.cancelled")
SEEDS_PER_TRIAL: Final = 1_000_000
"""Jobs of one trial at most: a campaign that goes on never meets a job of the one before."""


@dataclass
class Outcome:
    """What both campaigns have in common."""

    times: int = 0
    problems: list[str] = field(default_factory=list)
    counted: dict[str, int] = field(default_factory=dict)

    def counts(self) -> str:
        return ", ".join(f"{count} {what}" for what, count in self.counted.items())

    def result(self) -> CampaignResult:
        raise NotImplementedError


def settings(folder: Path, receiver: Receiver) -> Path:
    """A file with what cannot stand in the environment."""
    path = folder / "hub.toml"
    kinds = ", ".join(f'"{kind}"' for kind in HOOK_KINDS)
    hook = f'url = "{receiver.url}", secret = "{secrets.token_hex(16)}", kinds = [{kinds}], allow = ["127.0.0.0/8"]'
    path.write_text(f"[hub]\nstale_after_s = {LEASE_S}\nwebhooks = [{{ {hook} }}]\n", encoding="utf-8")
    path.chmod(0o600)
    return path


class Crew:
    """Joins once the hub answers, and works until it is closed."""

    def __init__(self, hub: HubProcess, receiver: Receiver, hosts: int, dice: random.Random, first_seed: int) -> None:
        self._hub = hub
        self._count = hosts
        self._dice = dice
        self._first_seed = first_seed
        self.books = Books()
        self.hosts: list[Host] = []
        self.host_ids: dict[str, str] = {}
        self.receiver = receiver
        self._since = ("", 0)
        """Where the feed was when the round began: its cursor, and how much the listener had heard."""

    async def rounds(
        self, trials: Sequence[T], per_round: int, do: Callable[[Sequence[T]], Awaitable[None]], outcome: Outcome
    ) -> AsyncIterator[CampaignResult]:
        """Let `do` hurt the hub, one round after the other, while everybody works; compare everything after each.

        A round that showed a problem at once is the last, and is not counted.
        """
        try:
            await self._hub.first_start()
            await self.join()
            for begin in range(0, len(trials), per_round):
                now = trials[begin : begin + per_round]
                self._work()
                await do(now)
                if not self.books.problems:
                    await self._settle_down()
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
        outcome.problems = [*self.books.told(), *self._hub.crashes]
        outcome.counted = dict(sorted(self.books.counted.items()))

    async def join(self) -> None:
        await asyncio.to_thread(self._join)

    def _join(self) -> None:
        with self._hub.operator() as operator:
            for number in range(self._count):
                name = f"host{number}"
                made = operator.call(
                    "POST", "/v1/hosts/local", wire.LocalHostReply, body=wire.LocalHostRequest(name=name)
                )
                self.host_ids[name] = made.host_id
                temper = HOLDER if number % 4 == 0 else Temper(count=1 + number % 3)
                dice = random.Random(self._dice.random())  # noqa: S311 - no secret
                login = (name, Secret(made.secret))
                self.hosts.append(Host(self._hub.address, login, self.books, temper, lease_s=LEASE_S, dice=dice))
        dice = random.Random(self._dice.random())  # noqa: S311 - no secret
        backlog = 4 * self._count
        self.operator = Operator(self._hub.operator(), self.books, dice, self._first_seed, backlog)
        self.listener = Listener(self._hub.operator(), self.books)
        self.listener.start()
        for host in self.hosts:
            host.start()
        self.operator.start()

    def _work(self) -> None:
        self.operator.calm.clear()
        self.operator.rests.clear()
        for host in self.hosts:
            host.calm.clear()

    async def _settle_down(self) -> None:
        """Let all jobs end and compare everything; then the books begin anew."""
        self.operator.calm.set()
        for host in self.hosts:
            host.calm.set()
        await asyncio.to_thread(self._settle)

    def _settle(self) -> None:
        books, listener = self.books, self.listener
        with self._hub.operator() as client:
            audit.drain(client, books, self._idle)
            listener.caught_up()
            cursor, heard = self._since
            events = listener.events[heard:]
            audit.audit(client, books, self.host_ids, events)
            audit.check_feed(client, books, events, cursor)
            wanted = [event.cursor for event in events if event.kind in HOOK_KINDS]
            audit.check_webhook(books, wanted, self.receiver.got)
        self._since = (listener.cursor, len(listener.events))
        books.close_round()

    def _idle(self) -> bool:
        return self.operator.rests.is_set() and all(host.idle for host in self.hosts)

    async def close(self) -> None:
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        everybody: list[Host | Operator | Listener] = [*self.hosts]
        if self.hosts:
            everybody += [self.operator, self.listener]
        for each in everybody:
            each.stop()
        for each in everybody:
            each.join()
