"""Starts the agent: one per state folder, finds the sandbox, runs the self-test and the probe, then the loops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from strata.base import log
from strata.base.clock import SystemClock
from strata.base.errors import Code, StrataError
from strata.base.file_lock import lock_folder
from strata.base.private import private_folder, set_private_umask
from strata.base.support import report_experimental
from strata.fleet.agent import cgroup, identity
from strata.fleet.agent.identity import Membership
from strata.fleet.agent.loop import Agent, handle_signals
from strata.fleet.agent.prepare import HostContext, create_work_folder
from strata.fleet.agent.probe import ProbeResult, probe_host, ram_bytes
from strata.fleet.agent.sandbox import UNCONFINED, HostSandbox, detect_sandbox, is_root
from strata.fleet.agent.selftest import SelfTestResult, run_self_test
from strata.fleet.agent.settings import AgentSettings
from strata.fleet.agent.state import AgentState
from strata.fleet.agent.uv import build_variables
from strata.fleet.client.hub_api import HubApi
from strata.fleet.client.hub_client import HubClient
from strata.fleet.core.capability import Capability
from strata.fleet.core.job_command import inherited_by_jobs
from strata.fleet.wire.overview import HubHealth
from strata.http import otel

_log = log.get(__name__)


def run(settings: AgentSettings, environ: Mapping[str, str], announce: Callable[[str], None]) -> None:
    """Run the agent in a process of its own. `environ` is its own environment, of which jobs inherit a part."""

    def ready(member: Membership, _: Capability) -> None:
        announce(f"{member.name} works for {member.url}, work in {settings.work_folder}")

    set_private_umask()
    stop_traces = otel.configure("strata-agent", environ)
    try:
        asyncio.run(run_agent(settings, environ, ready))
    finally:
        stop_traces()


async def run_agent(
    settings: AgentSettings,
    environ: Mapping[str, str],
    ready: Callable[[Membership, Capability], None],
    hub: asyncio.Task[None] | None = None,
) -> None:
    """Run the agent until a signal stops it, or the hub ends that shares its process."""
    folder = private_folder(settings.state_folder)
    with lock_folder(folder, "lock", taken=f"another agent uses the state folder {folder}"):
        host, probed = await asyncio.to_thread(_prepare_host, settings, environ)
        agent = Agent(host, AgentState(settings.state_folder), SystemClock(), probed.capability)
        # Before it says that it is ready: from then on Ctrl-C has to end it in order.
        handle_signals(agent)
        ready(identity.load_membership(settings.state_folder), probed.capability)
        working = asyncio.create_task(agent.run())
        await asyncio.wait([working] if hub is None else [working, hub], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            agent.stop()
        await working


def _prepare_host(settings: AgentSettings, environ: Mapping[str, str]) -> tuple[HostContext, ProbeResult]:
    """Test and probe this host, and log what its owner should know. PRECONDITION if it fails its self-test."""
    member = identity.load_membership(settings.state_folder)
    client = identity.connect_to_hub(settings.state_folder)
    sandbox = find_sandbox(settings, environ)
    allowed = inherited_by_jobs(environ, settings.pass_env)
    failed = [result for result in check_host(settings, client, sandbox, allowed) if not result.ok]
    if failed:
        reasons = "; ".join(f"{result.check}: {result.reason}" for result in failed)
        raise StrataError(Code.PRECONDITION, f"the self-test of this host failed: {reasons}")
    probed = probe_capability(settings, allowed, sandbox)
    for problem in probed.problems:
        _log.warning("host_probe_incomplete", reason=problem)
    report_experimental(["gpus"] if probed.capability.gpus else [])
    if sandbox.job_user is None and is_root():
        _log.warning("jobs_run_as_root", hint="set run_as: jobs can read this host's credentials")
    _log.info("sandbox_detected", sandbox=sandbox.level, reason=sandbox.describe())
    host = HostContext(
        settings,
        HubApi(client),
        allowed,
        sandbox.job_user,
        build_variables(environ),
        sandbox,
        is_local=not member.valid_for_s,
        is_ephemeral=member.ephemeral,
    )
    return host, probed


def find_sandbox(settings: AgentSettings, environ: Mapping[str, str]) -> HostSandbox:
    """Returns what confines jobs on this host. PRECONDITION if it cannot do what the settings require."""
    create_work_folder(settings)
    return detect_sandbox(settings, environ, ram_bytes(cgroup.memory_limit()))


def check_host(
    settings: AgentSettings, client: HubClient | None, sandbox: HostSandbox, allowed: Mapping[str, str]
) -> list[SelfTestResult]:
    """The self-test, with the hub's clock if the hub is reachable: an agent may start while the hub is away."""
    results: list[SelfTestResult] = []
    ahead_s = None
    if client is not None:
        try:
            client.call("GET", "/v1/health", HubHealth, timeout_s=10.0)
            ahead_s = client.ahead_s
            results.append(SelfTestResult(check="hub", ok=True, reason="answers"))
        except StrataError as error:
            _log.warning("hub_unreachable", reason=error.message)
    private_folder(settings.state_folder)
    return results + run_self_test(settings, allowed, ahead_s=ahead_s, sandbox=sandbox)


def probe_capability(
    settings: AgentSettings, allowed: Mapping[str, str], sandbox: HostSandbox = UNCONFINED
) -> ProbeResult:
    return probe_host(allowed, settings, sandbox.level, sandbox.lacks, sandbox.limits)
