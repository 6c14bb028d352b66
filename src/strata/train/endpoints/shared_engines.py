"""`SharedEngines`: engines of the server that share devices with the ranks: which are known to be awake, and how they
sleep and wake.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from strata.train.endpoints.engine import Engine
from strata.train.endpoints.vllm import VllmEngine


class SharedEngines:
    def __init__(
        self,
        names: Sequence[str],
        find_engine: Callable[[str], Engine],
        locks: Mapping[str, asyncio.Lock],
        on_wake: Callable[[], None],
    ) -> None:
        self.asleep = frozenset(names)
        """Those that are not known to be awake: nothing is sent to them."""
        self._find_engine = find_engine
        self._locks = locks
        self._on_wake = on_wake

    async def sleep(self, name: str) -> None:
        """Have an engine leave the devices. UNAVAILABLE or DEADLINE unless it confirms that."""
        self.asleep |= {name}
        async with self._locks[name]:
            await self._engine(name).sleep()

    async def wake(self, name: str) -> None:
        """Have an engine use the devices, after the ranks have left them."""
        async with self._locks[name]:
            await self._engine(name).wake()
        self.asleep -= {name}
        self._on_wake()

    async def is_asleep(self, name: str) -> bool:
        """Says what the engine itself replies."""
        return await self._engine(name).is_asleep()

    def _engine(self, name: str) -> VllmEngine:
        engine = self._find_engine(name)
        assert isinstance(engine, VllmEngine), "the server starts no other engine"
        return engine
