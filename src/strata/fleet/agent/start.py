"""From settings to a running agent: one per state folder, tested before it asks for jobs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping

from strata.base import log
from strata.base.clock import SystemClock
from strata.base.errors import Code, StrataError
from strata.base.private import write_privately
from strata.fleet.agent import environment, identity
from strata.fleet.agent.calls import Calls
from strata.fleet.agent.disk import private_folder
from strata.fleet.agent.lock import try_lock
from strata.fleet.agent.loop import Agent, handle_signals
from strata.fleet.agent.prepare import Site, make_work
from strata.fleet.agent.probe import Probed, probe
from strata.fleet.agent.selftest import Finding, self_test
from strata.fleet.agent.settings import AgentSettings
from strata.fleet.agent.state import State
from strata.fleet.agent.workdir import owner_of
from strata.fleet.client import HubClient
from strata.fleet.wire import Health

_log = log.get(__name__)


def run(settings: AgentSettings, environ: Mapping[str, str], announce: Callable[[str], None]) -> None:
    """Until it is told to stop. `environ` is the agent's own environment, of which jobs get what is allowed."""
    write_privately()
    folder = private_folder(settings.state_folder)
    member = identity.membership(folder)
    lock = try_lock(folder / "lock")
    if lock is None:
        raise StrataError(Code.CONFLICT, f"another agent works in {folder}")
    try:
        client = identity.connect(folder)
        findings = check(settings, client)
        bad = [finding for finding in findings if not finding.ok]
        if bad:
            reasons = "; ".join(f"{finding.what}: {finding.reason}" for finding in bad)
            raise StrataError(Code.PRECONDITION, f"this host is not fit for jobs: {reasons}", hint="strata agent check")
        allowed = environment.allowed(environ, settings.pass_env)
        probed = capability(settings, allowed)
        for problem in probed.problems:
            _log.warning("not everything about this host could be found out", reason=problem)
        site = Site(settings, Calls(client), allowed, owner_of(settings.run_as))
        if site.owner is None and hasattr(os, "geteuid") and os.geteuid() == 0:
            _log.warning("jobs run as root and can read this host's credentials; set run_as")
        announce(f"{member.name} works for {member.url}, {settings.slots} slots, work in {settings.work_folder}")
        asyncio.run(_run(site, probed))
    finally:
        os.close(lock)


def check(settings: AgentSettings, client: HubClient | None) -> list[Finding]:
    """The self-test, with the hub's clock if the hub can be reached: an agent may start while it is away."""
    found: list[Finding] = []
    ahead_s = None
    make_work(settings)
    if client is not None:
        try:
            client.call("GET", "/v1/health", Health, timeout_s=10.0)
            ahead_s = client.ahead_s
            found.append(Finding(what="hub", ok=True, reason="answers"))
        except StrataError as error:
            _log.warning("the hub does not answer", reason=error.message)
    return found + self_test(
        private_folder(settings.state_folder),
        settings.work_folder,
        min_free_gib=settings.min_free_gib,
        max_skew_s=settings.max_skew_s,
        ahead_s=ahead_s,
        owner=owner_of(settings.run_as),
    )


def capability(settings: AgentSettings, allowed: Mapping[str, str]) -> Probed:
    return probe(allowed, interpreter=settings.interpreter, source=settings.source, labels=settings.labels)


async def _run(site: Site, probed: Probed) -> None:
    agent = Agent(site, State(site.settings.state_folder), SystemClock(), probed.capability)
    handle_signals(agent)
    await agent.run()
