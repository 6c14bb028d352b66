"""What every engine adapter keeps, whatever engine is behind it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import pytest

from strata.base.errors import Code, StrataError
from strata.train.endpoints.engine import Engine, Version

Ask = Callable[[Version], Awaitable[Sequence[int] | str]]


@dataclass(frozen=True)
class Case:
    engine: Engine
    first: Version
    second: Version
    """Other weights of the same model."""
    ask: Ask
    """What the engine itself says under a version's name, not through the adapter."""


async def an_engine_has_what_it_was_told_of_and_nothing_else(case: Case) -> None:
    engine = case.engine
    assert not {case.first.name, case.second.name} & set(await engine.versions())
    await engine.take(case.first)
    assert case.first.name in await engine.versions()
    told = await case.ask(case.first)
    await engine.take(case.first)
    assert (await engine.versions()).count(case.first.name) == 1
    assert await case.ask(case.first) == told
    await engine.take(case.second)
    assert await case.ask(case.second) != told
    assert case.second.name in await engine.versions()


async def files_that_are_gone_are_refused_and_the_engine_lives_on(case: Case) -> None:
    lost = Version("run-v999", case.first.folder.with_name("gone"), whole=case.first.whole)
    with pytest.raises(StrataError) as refused:
        await case.engine.take(lost)
    assert refused.value.code is Code.NOT_FOUND
    assert lost.name not in await case.engine.versions()
    await case.engine.take(case.second)
    await case.ask(case.second)


async def what_is_let_go_of_is_gone_and_the_other_stays(case: Case) -> None:
    """Not of whole models, of which there is one at a time."""
    engine = case.engine
    await engine.take(case.first)
    await engine.take(case.second)
    told = await case.ask(case.second)
    for _ in range(2):
        await engine.drop(case.first.name)
        assert case.first.name not in await engine.versions()
    assert await case.ask(case.second) == told
    await engine.take(case.first)
    assert case.first.name in await engine.versions()


ADAPTERS = (
    an_engine_has_what_it_was_told_of_and_nothing_else,
    files_that_are_gone_are_refused_and_the_engine_lives_on,
    what_is_let_go_of_is_gone_and_the_other_stays,
)
WHOLE = ADAPTERS[:2]
