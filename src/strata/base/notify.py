"""Notifications between tasks: for a key (`KeyedNotifier`) or for any change (`Broadcast`).

A waiter subscribes before it reads the state it waits on, so that a notification in between still wakes it. Ten
thousand tasks may wait for one key: the cost of a wake-up or a timeout is the same for each of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Notification(Generic[Value]):
    """One notification that many tasks wait for. It arrives once, with a value, or it is cancelled."""

    def __init__(self) -> None:
        self._values: list[Value] = []
        self._cancelled = False
        # A dict, so that a waiter that times out is removed without a search.
        self._waiters: dict[asyncio.Future[None], None] = {}

    def done(self) -> bool:
        return bool(self._values) or self._cancelled

    def cancelled(self) -> bool:
        """Says whether it will never arrive in this process."""
        return self._cancelled

    def result(self) -> Value:
        return self._values[0]

    def set(self, value: Value) -> None:
        self._values.append(value)
        self._wake_all()

    def cancel(self) -> None:
        self._cancelled = True
        self._wake_all()

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Says whether it arrived within the timeout; False also if it was cancelled."""
        if not self.done():
            await self._wait(timeout_s)
        return self.done() and not self._cancelled

    async def _wait(self, timeout_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiters[waiter] = None
        timer = loop.call_later(timeout_s, _resolve, waiter) if timeout_s is not None else None
        try:
            await waiter
        finally:
            self._waiters.pop(waiter, None)
            if timer is not None:
                timer.cancel()

    def _wake_all(self) -> None:
        waiters, self._waiters = self._waiters, {}
        for waiter in waiters:
            _resolve(waiter)


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class KeyedNotifier(Generic[Value]):
    """Wakes all subscribers of a key. It remembers a key only while a task subscribes to it."""

    def __init__(self) -> None:
        self._subscriptions: dict[Hashable, _Subscription[Value]] = {}

    def __len__(self) -> int:
        return len(self._subscriptions)

    def subscribe(self, key: Hashable) -> _Subscription[Value]:
        """Returns a context manager for the next notification of this key, shared with all its subscribers."""
        subscription = self._subscriptions.get(key)
        if subscription is None:
            subscription = self._subscriptions[key] = _Subscription(key, self._subscriptions)
        return subscription

    def notify(self, key: Hashable, value: Value) -> None:
        subscription = self._subscriptions.pop(key, None)
        if subscription is not None:
            subscription.notification.set(value)

    def cancel_all(self) -> None:
        """No notification will arrive in this process any more."""
        subscriptions, self._subscriptions = self._subscriptions, {}
        for subscription in subscriptions.values():
            subscription.notification.cancel()


class _Subscription(Generic[Value]):
    """Entered once by each subscriber; the last one that leaves removes it."""

    def __init__(self, key: Hashable, subscriptions: dict[Hashable, _Subscription[Value]]) -> None:
        self.notification: Notification[Value] = Notification()
        self._key = key
        self._subscriptions = subscriptions
        self._entered = 0

    def __enter__(self) -> Notification[Value]:
        self._entered += 1
        return self.notification

    def __exit__(self, *_: object) -> None:
        self._entered -= 1
        if not self._entered and self._subscriptions.get(self._key) is self:
            del self._subscriptions[self._key]


class Broadcast:
    """Wakes every waiter at any change; a waiter then reads the state again."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def notify(self) -> None:
        self._next.set()
        self._next = asyncio.Event()

    def next(self) -> asyncio.Event:
        """Set at the next change. Take it before reading the state: a change in between is not missed."""
        return self._next
