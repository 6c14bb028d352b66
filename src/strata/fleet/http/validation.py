"""Runs checks of manifests in two threads of their own with a deadline of 120 s, ended when the client leaves.

A manifest may take long to check, and the caller chooses what is in it. So a check has a deadline, ends when its client
leaves, and never takes the threads that logs, pages and chunks are read with.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar
from weakref import WeakValueDictionary

from strata.base.errors import Code, StrataError

T = TypeVar("T")
Checkpoint = Callable[[], None]
"""Raises if the check that calls it should end."""

THREADS: Final = 2
VALIDATE_S: Final = 120.0


class ValidationPool:
    """Runs one check of each owner at a time."""

    def __init__(self, limit_s: float = VALIDATE_S) -> None:
        self._limit_s = limit_s
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="validation")
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def run(self, owner: str, check: Callable[[Checkpoint], T]) -> T:
        """The result of `check`; DEADLINE if it takes too long. It ends soon after this call is cancelled."""
        cancelled = threading.Event()

        def checked() -> T:
            ends_s = time.monotonic() + self._limit_s

            def checkpoint() -> None:
                if cancelled.is_set() or time.monotonic() > ends_s:
                    message = f"the check of the parameters takes longer than {self._limit_s:g} s"
                    raise StrataError(Code.DEADLINE, message, hint="send fewer jobs at a time, or a simpler schema")

            return check(checkpoint)

        turn = self._turns.setdefault(owner, asyncio.Lock())
        try:
            async with turn:
                return await asyncio.get_running_loop().run_in_executor(self._threads, checked)
        finally:
            cancelled.set()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
