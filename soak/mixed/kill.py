"""Kill hub, agents, hosts, ranks and gang workers while one hub has all kinds of work; nothing may be lost or doubled.

Script jobs, a gang, a sweep and a training server are at work at once. Two tenants train through the hub's URL, each
with a key of the hub and the `tinker` SDK as it is published. After each round of kills all that was queued ends, and
is compared with what it would have been in peace: `expected_state` here and in `soak.fleet_agent`, and for the models a
training server outside of the fleet that nobody disturbs.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import tinker

from soak.fleet_agent.fleet import Fleet, Plan
from soak.fleet_agent.outcome import LEASE_S, KillOutcome
from soak.fleet_agent.process_kills import ProcessKiller
from soak.fleet_agent.processes import wait_until
from soak.mixed.work import MixedWork, MixPlan
from soak.train import sdk
from soak.train.compare import compare_files, compare_results, final_folder
from soak.train.fault_injection import MODULES
from soak.train.outcome import Outcome
from soak.train.result_times import ResultTimes
from soak.train.server import ServeOptions, make_model, runs_module, serving
from soak.trials import CampaignRequest, CampaignResult, OnProgress, seeded_random, spread_s, while_running
from strata.base.atomic import write_file
from strata.base.clock import SystemClock
from strata.cli.coordinator import OWN_COMMAND
from strata.coord.private import PrivateCoordinator
from strata.fleet.core.job import Cause
from tests.support.ports import port_of, reserve_port

ROUND: Final = 12
SLOTS: Final = 3
ENDLESS: Final = 1 << 30
PAUSE_S: Final = 2.0
RECOVERS_S: Final = 240.0
"""How long a tenant or the gang may take to get on after a kill: a server may have to start again."""
HOST_AWAY: Final = 1.3
"""The part of a lease for which a dead host stays away, in every second of its trials."""
TENANTS: Final = ("alice", "bob")
KINDS: Final = (
    *("hub", "server rank", "gang worker", "agent", "child", "host"),
    *("server rank", "hub away", "gang worker", "supervisor", "server process", "agent and hub"),
)
_GANG: Final = b"gang_worker.py"


@dataclass
class MixedOutcome:
    kills: KillOutcome = field(default_factory=KillOutcome)
    times: int = 0
    """Trials whose work was compared."""
    steps: int = 0
    equal: int = 0
    """Models whose results and files are those of an undisturbed server."""
    gangs: int = 0
    trials: int = 0
    recovered_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """By kind of trial, from a kill to the result of an operation that a tenant sent after it."""

    @property
    def problems(self) -> list[str]:
        return self.kills.problems

    def result(self) -> CampaignResult:
        kills = self.kills
        victims = ", ".join(f"{count} {what}" for what, count in sorted(kills.victims.items()))
        every = [seconds for found in self.recovered_s.values() for seconds in found]
        each = "; ".join(f"{name} {spread_s(found)}" for name, found in sorted(self.recovered_s.items()))
        figures = (
            f"killed: {victims}; {kills.jobs} jobs in {kills.attempts} attempts compared, of them {self.gangs} gangs"
            f" and {self.trials} trials of sweeps; {self.steps} steps of {self.equal} models, results and files equal"
            f" to those of an undisturbed server; {kills.kept} attempts went on after the death of their agent,"
            f" {kills.slow} agents were away too long for that; kill to the result of an operation sent after it"
            f" {spread_s(every)}: {each}"
        )
        return CampaignResult(
            times=self.times, problems=self.problems, figures=figures, worst_s=max(every, default=0.0)
        )


class MixedCampaign:
    def __init__(self, request: CampaignRequest, plan: MixPlan, kinds: Sequence[str]) -> None:
        self._folder = request.folder
        self._first = request.first
        self._times = request.times
        self._kinds = kinds
        self._guard = reserve_port()
        address, secret = f"127.0.0.1:{port_of(self._guard)}", request.folder / "token.secret"
        write_file(secret, b"s" * 32)
        # A worker that was killed is missed after some heartbeats.
        often = ("env", "STRATA_COORDINATOR_JOB_HEARTBEAT_INTERVAL_S=1")
        self._coordinator = PrivateCoordinator(
            command=(*often, *OWN_COMMAND), address=address, folder=request.folder, secret=secret
        )
        self._fleet = fleet = Fleet(
            request,
            Plan(),
            hosts=request.workers,
            slots=SLOTS,
            lease_s=LEASE_S,
            hub={"COORDINATOR_ADDRESS": address, "COORDINATOR_TOKEN_SECRET_FILE": str(secret)},
        )
        self.outcome = MixedOutcome()
        self._kills = kills = ProcessKiller(fleet, self.outcome.kills)
        self._work = MixedWork(fleet, kills, request.folder, plan, request.first)
        self._result_times = ResultTimes()
        self._keys: list[str] = []
        self._trials: dict[str, Callable[[random.Random], Awaitable[None]]] = {
            "hub": kills.kill_hub,
            "hub away": lambda dice: kills.kill_hub(dice, LEASE_S * HOST_AWAY),
            "agent": kills.kill_agent,
            "agent and hub": kills.kill_agent_and_hub,
            "child": lambda dice: kills.kill_child(dice, "child"),
            "supervisor": lambda dice: kills.kill_child(dice, "supervisor"),
            "host": self._kill_host,
            "server rank": lambda dice: self._kill_of_server(dice, ("rank 0", "rank 1")),
            "server process": lambda dice: self._kill_of_server(dice, ("orchestrator", "api")),
            "gang worker": self._kill_gang_worker,
        }

    async def run(self, on_progress: OnProgress) -> None:
        outcome, model = self.outcome, self._folder / "tiny"
        await asyncio.to_thread(make_model, model)
        coordinating = asyncio.create_task(self._coordinator.keep(SystemClock(), outcome.problems.append))
        try:
            await self._fleet.start()
            await self._work.start_server(model)
            self._keys = [await self._work.make_key(name) for name in TENANTS]
            first, end = self._first, self._first + self._times
            while first < end and not outcome.problems:
                numbers = range(first, min(first - first % ROUND + ROUND, end))
                await self._run_round(numbers, model)
                on_progress(outcome.result())
                first = numbers.stop
            if not outcome.problems:
                outcome.problems.extend(await self._work.end_server())
                outcome.problems.extend(await self._fleet.find_leftovers())
        except (TimeoutError, tinker.TinkerError) as error:
            outcome.problems.append(f"{type(error).__name__}: {error}")
        finally:
            outcome.problems.extend(self._fleet.crashes)
            await self._fleet.close()
            coordinating.cancel()
            await asyncio.wait([coordinating])
            self._guard.close()

    async def _run_round(self, numbers: range, model: Path) -> None:
        outcome = self.outcome
        async with AsyncExitStack() as stack:
            trainers = await self._open_trainers(stack, self._fleet.hub.url, self._keys, self._result_times)
            enough = asyncio.Event()
            training = [asyncio.create_task(each.train(enough, ENDLESS)) for each in trainers]
            filling = asyncio.create_task(self._work.keep_filled(enough))
            try:
                for number in numbers:
                    await while_running([*training, filling], self._run_trial(number))
                    if outcome.problems:
                        return
                enough.set()
                steps = await asyncio.gather(*training)
                await filling
                await asyncio.gather(*(each.finish() for each in trainers))
                outcome.steps += sum(steps)
            finally:
                for task in (*training, filling):
                    task.cancel()
            outcome.problems.extend(await self._work.drain())
        outcome.gangs, outcome.trials = self._work.gangs, self._work.trials
        if not outcome.problems:
            await self._compare_models(self._folder / f"calm-{numbers.start}", model, trainers)
        if not outcome.problems:
            outcome.times += len(numbers)

    async def _open_trainers(
        self, stack: AsyncExitStack, url: str, keys: Sequence[str], result_times: ResultTimes
    ) -> list[sdk.SdkTrainer]:
        """One model of each key."""
        made = []
        for place, key in enumerate(keys):
            made += await stack.enter_async_context(sdk.trainers(url, key, (place,), result_times))
        return made

    async def _compare_models(self, folder: Path, model: Path, trainers: Sequence[sdk.SdkTrainer]) -> None:
        """The same steps in peace, on a server that belongs to no fleet and takes no snapshots."""
        found = Outcome()
        checkpoints = self._work.server_data / "checkpoints"
        async with serving(folder, model, "real", options=ServeOptions()) as calm, AsyncExitStack() as stack:
            again = await self._open_trainers(stack, calm.url, [calm.key] * len(trainers), ResultTimes())
            for place, (one, other) in enumerate(zip(trainers, again, strict=True)):
                await other.train(asyncio.Event(), one.steps)
                await other.finish()
                compare_results(place, one.results, other.results, found)
                final = final_folder(calm.settings.checkpoint_folder, other.model_id, sdk.FINAL)
                problem = compare_files(final_folder(checkpoints, one.model_id, sdk.FINAL), final, one.steps)
                self.outcome.equal += problem is None
                found.problems += [f"model {place}: {problem}"] if problem else []
        self.outcome.problems.extend(found.problems)

    async def _run_trial(self, number: int) -> None:
        kind, dice = self._kinds[number % len(self._kinds)], seeded_random(number)
        await asyncio.sleep(dice.uniform(0.0, PAUSE_S))
        try:
            await self._trials[kind](dice)
            killed_s = self.outcome.kills.killed_s
            async with asyncio.timeout(RECOVERS_S):
                await self._result_times.wait_sent_after(killed_s)
        except TimeoutError as error:
            raise TimeoutError(f"trial {number}, {kind}: {str(error) or 'tenants get no results'}") from error
        self.outcome.recovered_s[kind].append(time.monotonic() - killed_s)
        self.outcome.problems.extend(await self._work.check_ended())

    # Victims that other campaigns do not have

    async def _kill_host(self, dice: random.Random) -> None:
        """Agent, supervisors and children, as in a power failure: back at once, or after its leases have expired."""
        host, _ = await self._kills.busy_host(dice)
        await host.kill_host()
        self.outcome.kills.killed("hosts")
        self._kills.allow(await self._fleet.held_attempts(host), Cause.HOST_LOST, Cause.INFRA)
        await asyncio.sleep(dice.choice((0.0, LEASE_S * HOST_AWAY)))
        await host.start()
        await self._fleet.wait_seen(host, time.time())

    async def _kill_of_server(self, dice: random.Random, names: Sequence[str]) -> None:
        module, _, rank = dice.choice(names).partition(" ")

        def pids() -> list[int]:
            every = self._fleet.hosts[0].processes()
            return [pid for pid in every if runs_module(pid, MODULES[module], rank)]

        pid = (await wait_until(pids, RECOVERS_S, f"the training server has {module} {rank}"))[0]
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self.outcome.kills.killed("server ranks" if rank else f"server {module}s")

    async def _kill_gang_worker(self, dice: random.Random) -> None:
        """The gang has to go on afterwards."""
        pid = dice.choice(await wait_until(self._gang_workers, RECOVERS_S, "a gang has workers"))
        goes_on = self._work.gang_progress()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self.outcome.kills.killed("gang workers")
        await wait_until(goes_on, RECOVERS_S, "the gang goes on")

    def _gang_workers(self) -> list[int]:
        found = []
        for pid in [pid for host in self._fleet.hosts for pid in host.processes()]:
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes()
                # torchrun has the program among its arguments too, but no rank.
                if _GANG in words and b"\0RANK=" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
                    found.append(pid)
        return found


async def run(
    request: CampaignRequest, on_progress: OnProgress, *, plan: MixPlan | None = None, kinds: Sequence[str] = KINDS
) -> CampaignResult:
    """Another `plan` and other `kinds` are for a short run."""
    # The SDK reports to the server it trains on what it does, which would be one thing more to be retried.
    os.environ["TINKER_TELEMETRY"] = "0"  # noqa: TID251 - of the SDK in this process
    campaign = MixedCampaign(request, plan or MixPlan(), kinds)
    await campaign.run(on_progress)
    return campaign.outcome.result()
