"""Kill two hubs over one PostgreSQL in turn, under load behind one address: no client may notice more than a retry.

Real hubs with TLS and one shared folder, a load balancer of TCP connections, agents that joined through it, commands of
two people, and a webhook at both hubs. One hub lives at any moment. So nothing excuses an attempt that is lost, a
command that fails, or a log, metric or result that is not whole: each of them is a problem. The webhook may be repeated
once for each kill. A hub is frozen before it is killed, until a command waits for its reply: without a retry each kill
would fail one.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from soak.fleet_agent import expected_state
from soak.fleet_agent.fleet import Operator, Plan
from soak.fleet_agent.processes import AgentProcess, wait_until
from soak.fleet_hub.workers import settings
from soak.hub_process import STRATA, HubProcess
from soak.trials import CampaignRequest, CampaignResult, OnProgress, seeded_random, spread_s
from strata.base.errors import StrataError
from strata.base.secret import read_secret
from strata.fleet.client.hub_client import RETRY_FOR_S, HubClient, TlsFiles
from strata.fleet.core.job import TERMINAL
from strata.hub.compose import TOKEN_FILE
from strata.sdk.fleet import pin_of
from tests.support.postgres import PostgresServer
from tests.support.proxy import LoadBalancer
from tests.support.webhook_receiver import WebhookReceiver

SLOTS: Final = 2
LEASE_S: Final = 15.0
COMMAND_S: Final = 120.0
FINISH_S: Final = 180.0
FEED_S: Final = 0.3
REPLY_S: Final = 1.0
NAMES: Final = ("first", "second")
PEOPLE: Final = ("anna", "bert")


@dataclass
class TwoHubsOutcome:
    kills: int = 0
    problems: list[str] = field(default_factory=list)
    serving_s: list[float] = field(default_factory=list)
    commands: Counter[str] = field(default_factory=Counter)
    broken: int = 0
    jobs: int = 0
    attempts: int = 0
    log_bytes: int = 0
    delivered: int = 0
    repeated: int = 0

    def result(self) -> CampaignResult:
        figures = (
            f"restart to serving {spread_s(self.serving_s)}; {self.broken} connections broken;"
            f" {sum(self.commands.values())} commands; {self.jobs} jobs in {self.attempts} attempts,"
            f" {self.log_bytes / 1e6:.1f} MB of logs compared; {self.delivered} events delivered, {self.repeated} twice"
        )
        return CampaignResult(times=self.kills, problems=self.problems, figures=figures)


class Person:
    """Runs commands of the command line behind the balancer."""

    def __init__(self, home: Path, url: str, program: str = STRATA) -> None:
        self._url = url
        self._program = program
        self._home = home
        (home / "work").mkdir(parents=True)
        (home / "work" / "hello.py").write_text("print('hello')\n")
        self._environ = {"PATH": os.defpath, "HOME": str(home), "XDG_CONFIG_HOME": str(home), "COLUMNS": "80"}

    async def run(self, *words: str, stdin: str = "") -> str:
        """What the command printed; RuntimeError if it fails."""
        process = await asyncio.create_subprocess_exec(
            self._program,
            *words,
            env=self._environ,
            cwd=self._home / "work",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(COMMAND_S):
                out, err = await process.communicate(stdin.encode())
        finally:
            if process.returncode is None:
                process.kill()
        if process.returncode != 0:
            raise RuntimeError(f"strata {' '.join(words)} ended with {process.returncode}: {err.decode()[-400:]}")
        return out.decode()

    async def login(self, pin: str, token: Path) -> None:
        await self.run("login", self._url, "--ca-pin", pin, "--name", "lab", "--token-file", str(token))

    async def join(self, host: AgentProcess, url: str) -> None:
        token = json.loads(await self.run("invite", "-o", "json"))["token"]
        await self.run("join", url, "--name", host.name, "--state", str(host.state), stdin=token)
        host.host_id = json.loads((host.state / "identity" / "hub.json").read_text())["host_id"]

    def commands(self, job_id: str, number: int) -> tuple[str, ...]:
        """One after the other of those that a person uses."""
        every = self.every_command(job_id, number)
        return every[number % len(every)]

    def every_command(self, job_id: str, number: int) -> tuple[tuple[str, ...], ...]:
        return (
            ("status",),
            ("run", "--seed", str(number), "--environment", "none", "--", "python", "hello.py"),
            ("list",),
            ("artifacts", "list"),
            ("show", job_id),
            ("events", "--job", job_id),
            ("run", "-d", "--seed", str(number), "--environment", "none", "--", "python", "hello.py"),
            ("wait", job_id),
        )


class Campaign:
    def __init__(self, request: CampaignRequest, plan: Plan, receiver: WebhookReceiver) -> None:
        self._request = request
        self._plan = plan
        self._receiver = receiver
        self._shared = request.folder / "shared"
        given = {"SHARED": str(self._shared), "TLS_ENABLED": "true", "STALE_AFTER_S": str(LEASE_S), "DRAIN_S": "1"}
        config = settings(request.folder, receiver)
        self.hubs = [self._hub(name, given, config) for name in NAMES]
        self.hosts = [AgentProcess(request.folder, f"host-{number}", SLOTS) for number in range(request.workers)]
        self.outcome = TwoHubsOutcome()
        self._jobs: list[str] = []
        self._seeds = itertools.count(request.first * 1000)

    def _hub(self, name: str, given: dict[str, str], config: Path) -> HubProcess:
        folder = self._request.folder / name
        folder.mkdir()
        return HubProcess(folder, database=self._request.url, settings=given, config=config)

    async def run(self, on_progress: OnProgress) -> None:
        # At once, on a database without tables and a folder without an authority.
        await asyncio.gather(*(hub.first_start() for hub in self.hubs))
        ports = [hub.port for hub in self.hubs]
        # People come through a balancer of their own, which says when a hub has got a request of theirs.
        async with LoadBalancer(ports) as balancer, LoadBalancer(ports) as front:
            url = f"https://127.0.0.1:{balancer.port}"
            ca, token = self._shared / "ca" / "ca.pem", self._shared / TOKEN_FILE
            people = [Person(self._request.folder / name, f"https://127.0.0.1:{front.port}") for name in PEOPLE]
            for person in people:
                await person.login(pin_of(ca.read_bytes()), token)
            for host in self.hosts:
                await people[0].join(host, url)
                await host.start()
            marks = self._request.folder / "marks"
            marks.mkdir()

            def connect() -> HubClient:
                return HubClient(url, bearer=read_secret(token), tls=TlsFiles(ca=ca), retry_for_s=RETRY_FOR_S)

            operator = Operator(connect, self._plan, marks)
            try:
                await self._kill_under_load(operator, people, front, on_progress)
                await self._compare(operator)
            finally:
                operator.close()
                self.outcome.broken = balancer.broken + front.broken

    async def _kill_under_load(
        self, operator: Operator, people: Sequence[Person], front: LoadBalancer, on_progress: OnProgress
    ) -> None:
        load = [asyncio.create_task(self._submit(operator))]
        load += [asyncio.create_task(self._use(person, number)) for number, person in enumerate(people)]
        kills = asyncio.create_task(self._kill(front, on_progress))
        try:
            done, _ = await asyncio.wait([*load, kills], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (*load, kills):
                task.cancel()
            await asyncio.wait([*load, kills])

    async def _kill(self, front: LoadBalancer, on_progress: OnProgress) -> None:
        request = self._request
        for number in range(request.first, request.first + request.times):
            victim = self.hubs[number % len(self.hubs)]
            await asyncio.sleep(seeded_random(number).uniform(0.5, 2.5))
            await _freeze_under_way(victim, front)
            await victim.kill()
            self.outcome.kills += 1
            await victim.start()
            ready_s = await victim.ready()
            if ready_s is None:
                raise RuntimeError(f"the {NAMES[number % len(NAMES)]} hub does not start again: {victim.log}")
            self.outcome.serving_s.append(ready_s - victim.started_s)
            on_progress(self.outcome.result())

    async def _submit(self, operator: Operator) -> None:
        """Submit jobs so that the hosts never run out of them."""
        while True:
            waiting = len(self.hosts) * SLOTS + 2 - len(await asyncio.to_thread(operator.jobs))
            for _ in range(waiting):
                self._jobs.append(await asyncio.to_thread(operator.submit, next(self._seeds)))
            await asyncio.sleep(FEED_S)

    async def _use(self, person: Person, first: int) -> None:
        await wait_until(lambda: self._jobs, FINISH_S, "the first job is queued")
        for number in itertools.count(first, len(PEOPLE)):
            words = person.commands(self._jobs[0], number)
            await person.run(*words)
            self.outcome.commands[words[0]] += 1

    async def _compare(self, operator: Operator) -> None:
        """Without more kills all jobs end, and each of them is what an undisturbed run makes."""
        for job_id in self._jobs:

            def ended(job_id: str = job_id) -> bool:
                return operator.job(job_id).job.status in TERMINAL

            await wait_until(ended, FINISH_S, f"{job_id} is over")
            evidence = await asyncio.to_thread(
                lambda job_id=job_id: expected_state.gather_evidence(operator, operator.job(job_id))  # type: ignore[misc]
            )
            self.outcome.problems += expected_state.find_problems(evidence, self._plan, {})
            self.outcome.jobs += 1
            self.outcome.attempts += len(evidence.attempts)
            self.outcome.log_bytes += sum(map(len, evidence.logs.values()))
        await self._check_webhook()
        self.outcome.problems += self._crashes()

    async def _check_webhook(self) -> None:
        def completed() -> set[str]:
            return {json.loads(each.body)["subject"] for each in self._receiver.deliveries}

        await wait_until(lambda: completed() >= set(self._jobs), FINISH_S, "the webhook gets the end of each job")
        twice = Counter(self._receiver.cursors)
        self.outcome.delivered = len(twice)
        self.outcome.repeated = sum(count - 1 for count in twice.values())
        if self.outcome.repeated > self.outcome.kills:
            text = f"{self.outcome.repeated} events were delivered again after {self.outcome.kills} kills"
            self.outcome.problems.append(text)

    def _crashes(self) -> Iterator[str]:
        for hub in self.hubs:
            yield from hub.crashes
        for host in self.hosts:
            yield from host.crashes

    async def close(self) -> None:
        for host in self.hosts:
            await host.close()
        for hub in self.hubs:
            await hub.close()


async def _freeze_under_way(hub: HubProcess, front: LoadBalancer) -> None:
    """Freeze a hub; returns when it owes a command its reply."""
    hub.signal(signal.SIGSTOP)
    before = front.connected[hub.port]
    # What is open for longer than a reply takes waits as well: all commands may have connected before.
    await asyncio.sleep(REPLY_S)

    def owes() -> bool:
        return front.open[hub.port] > 0 or front.connected[hub.port] > before

    await wait_until(owes, COMMAND_S, "a command waits for a frozen hub")


async def run(request: CampaignRequest, on_progress: OnProgress, plan: Plan | None = None) -> CampaignResult:
    if not request.url:
        with PostgresServer() as server:
            return await run(msgspec.structs.replace(request, url=server.create_database()), on_progress, plan)
    with WebhookReceiver() as receiver:
        campaign = Campaign(request, plan or Plan(), receiver)
        try:
            await campaign.run(on_progress)
        except (TimeoutError, RuntimeError, StrataError) as error:
            campaign.outcome.problems.append(str(error))
        finally:
            await campaign.close()
    return campaign.outcome.result()
