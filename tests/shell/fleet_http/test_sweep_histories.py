"""Random histories of two manifests of one project while searches run, with kills of the hub.

The model is small: a sweep is what the last manifest that named it says, and belongs to that file; whatever a step does
not name stays byte for byte as it was.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from starlette.datastructures import Headers

from strata.base.clock import SystemClock
from strata.base.errors import Code, StrataError
from strata.base.failpoint import arm, disarm_all, fail
from strata.fleet.core.capability import Capability
from strata.fleet.core.job import TERMINAL
from strata.fleet.core.manifest import parse_manifest
from strata.fleet.http import manifests
from strata.fleet.http.context import HubContext
from strata.fleet.records import AttemptKey, HostRow, JobCompletion, JobFilter, JobRow
from strata.fleet.wire.manifests import ManifestReply, ManifestRequest
from strata.http.route import HttpCall
from strata.hub.compose import open_hub
from strata.hub.settings import HubSettings
from strata.hub.sweeps import SweepRunner
from strata.identity.roles import CallerKind, Principal, Role

OPERATOR = Principal(kind=CallerKind.OPERATOR, id="", role=Role.ADMIN)
HOST = "host_a"
NAMES = ("left", "right", "shared")
FILES = {"a.toml": ("left", "shared"), "b.toml": ("right", "shared")}
"""What each file may name."""


@dataclass
class Site:
    context: HubContext
    runner: SweepRunner

    async def apply(self, text: str, source: str, *, take_over: bool = False) -> ManifestReply:
        async def stays() -> Any:
            """The client sends no more, and does not leave."""
            await asyncio.Event().wait()

        call = HttpCall(
            context=self.context, caller=OPERATOR, path={}, headers=Headers(), receive=stays, reauthenticate=stays
        )
        manifest = parse_manifest(text, source).resolve()
        return await manifests.apply(call, ManifestRequest(manifest=manifest, take_over=take_over))

    async def rows(self) -> dict[str, JobRow]:
        return {row.id: row for row in await self.context.fleet.store.jobs.select(JobFilter(limit=1000, hidden=True))}

    async def stored(self) -> Mapping[str, bytes]:
        return {each.name: msgspec.json.encode(each) for each in await self.context.sweeps.listed()}


@asynccontextmanager
async def opened(data: Path) -> AsyncIterator[Site]:
    """A hub whose loops do not run: the test takes their turns."""
    settings = HubSettings(data=data, listen="127.0.0.1:0", keep_free_bytes=0)
    async with open_hub(settings, SystemClock()) as hub:
        owners = [getattr(loop.run_once, "__self__", None) for loop in hub.loops]
        (runner,) = [each for each in owners if isinstance(each, SweepRunner)]
        row = HostRow(id=HOST, name="a", capability=Capability(hostname="h", slots=64), registered_at_s=0.0)
        await hub.context.fleet.hosts.register(row, f"host:{HOST}")
        yield Site(hub.context, runner)


@dataclass
class History:
    random: Random
    texts: dict[str, str] = field(default_factory=dict)
    """What stands in each file."""
    named: dict[str, dict[str, int]] = field(default_factory=lambda: {file: {} for file in FILES})
    """The sweeps of each file, as they stand in it, with their numbers of trials."""
    owner: dict[str, str] = field(default_factory=dict)
    trials: dict[str, int] = field(default_factory=dict)
    """Of the sweeps that were applied."""
    stopped: set[str] = field(default_factory=set)
    claims: Any = field(default_factory=itertools.count)

    def edit(self, file: str) -> None:
        self.named[file] = {
            name: self.random.randint(1, 5)
            for name in FILES[file]
            if self.random.random() < (0.3 if name == "shared" else 0.7)
        }
        version = self.random.randint(0, 9)
        text = f'project = "p"\n[trainers.default]\ncommand = ["python", "v{version}.py"]\ndirectory = "/code"\n'
        text += f'[[jobs]]\nmodel = "{file[0]}"\nseed = {version}\n'
        for name, trials in self.named[file].items():
            text += f'[[sweeps]]\nname = "{name}"\nmodel = "{name}"\n[sweeps.search]\ntrials = {trials}\nparallel = 2\n'
            text += 'objective = { loss = "minimize" }\nspace = { x = { uniform = [0.0, 1.0] } }\n'
        self.texts[file] = text

    async def apply(self, site: Site, file: str) -> None:
        take_over = self.random.random() < 0.3
        taken = [name for name in self.named[file] if self.owner.get(name, file) != file]
        before, jobs = await site.stored(), await site.rows()
        if taken and not take_over:
            with pytest.raises(StrataError) as refused:
                await site.apply(self.texts[file], file)
            assert refused.value.code is Code.CONFLICT
            assert await site.stored() == before
            assert await site.rows() == jobs, "nothing of it was applied"
            return
        killed = self.random.random() < 0.3
        if killed:
            arm("fleet.apply.committed", fail)
            with pytest.raises(StrataError):
                await site.apply(self.texts[file], file, take_over=take_over)
            disarm_all()
        reply = await site.apply(self.texts[file], file, take_over=take_over)
        assert set(reply.stopped) == self.stopped & self.named[file].keys()
        self.owner |= dict.fromkeys(self.named[file], file)
        self.trials |= self.named[file]
        after = await site.stored()
        others = before.keys() - self.named[file].keys()
        assert {name: after[name] for name in others} == {name: before[name] for name in others}
        rows = await site.rows()
        trials = {id_: row for id_, row in jobs.items() if row.spec.sweep}
        assert {id_: rows[id_] for id_ in trials} == trials, "no trial was ended or rewritten"

    async def train(self, site: Site) -> None:
        await site.runner.run_once()
        fleet = site.context.fleet
        for lease in await fleet.claims.claim(HOST, f"c{next(self.claims)}", count=self.random.randint(1, 4)):
            held = AttemptKey(HOST, lease.job_id, lease.epoch)
            await fleet.leases.complete(held, JobCompletion(metrics={"loss": lease.spec.hyper.get("x", 0.0)}))

    async def stop(self, site: Site) -> None:
        name = self.random.choice(NAMES)
        sweeps, submitter = site.context.sweeps, next(iter(await site.context.sweeps.listed())).submitter
        if name in self.stopped:
            await sweeps.resume("p", name, "operator", submitter)
            self.stopped.discard(name)
            return
        before = {id_: row for id_, row in (await site.rows()).items() if row.spec.sweep != name}
        with suppress(StrataError):  # there is no such sweep, or it has ended
            await sweeps.stop("p", name, "operator", submitter)
            self.stopped.add(name)
        rows = await site.rows()
        assert {id_: rows[id_] for id_ in before} == before

    async def take_step(self, site: Site) -> bool:
        """Whether the hub is to be killed."""
        file = self.random.choice([*FILES])
        match self.random.choice(["apply", "apply", "edit", "train", "train", "stop", "kill"]):
            case "apply":
                await self.apply(site, file)
            case "edit":
                self.edit(file)
            case "train":
                await self.train(site)
            case "stop" if self.owner:
                await self.stop(site)
            case "kill":
                return True
            case _:
                pass
        stored = {each.name: each for each in await site.context.sweeps.listed()}
        assert {name: each.source for name, each in stored.items()} == self.owner
        assert {name for name, each in stored.items() if each.stopped} == self.stopped
        planned = {name: each.sweep.search.trials for name, each in stored.items() if each.sweep is not None}
        assert planned == self.trials
        return False


@pytest.mark.timeout(240)
@pytest.mark.parametrize("seed", range(6))
async def test_nothing_is_ended_or_rewritten_that_a_step_does_not_name(tmp_path: Path, seed: int) -> None:
    history = History(Random(seed))
    for file in FILES:
        history.edit(file)
    steps = 30
    while steps:
        async with opened(tmp_path / "hub") as site:
            while steps:
                steps -= 1
                if await history.take_step(site):
                    break
    async with opened(tmp_path / "hub") as site:
        for _ in range(40):
            await history.train(site)
        rows = [row for row in (await site.rows()).values() if row.spec.sweep]
        for name, planned in history.trials.items():
            done = [row for row in rows if row.spec.sweep == name and row.status in TERMINAL]
            assert name in history.stopped or len(done) >= planned, f"{name} came to its end"
