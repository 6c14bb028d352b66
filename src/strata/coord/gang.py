"""`strata gang run`: starts torchrun, or without torch the workers of one host (`local_workers`), and for a single host
a coordinator; restarts them, watches for hung workers and dumps their stacks, goes on with fewer workers after a drain,
and relays heartbeats; with the timeouts of all that.

torchrun starts failed workers again, all hosts together (`torch_rendezvous`). Here is what it cannot do: start a
coordinator and torchrun again when one of them dies, go on with fewer workers when some are drained, see to workers
that hang, and relay their heartbeats.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import quote

import msgspec
import psutil  # type: ignore[import-untyped]

from strata.base.atomic import write_file
from strata.base.clock import Clock
from strata.base.errors import Code, StrataError
from strata.base.loop import every
from strata.base.parent import TIED_COMMAND, end_with_parent
from strata.base.private import private_folder
from strata.base.retry import no_jitter
from strata.base.secret import Secret, read_secret
from strata.base.settings import load, process_environment
from strata.coord.operator import Operator, OperatorSettings
from strata.coord.private import (
    BACKOFF,
    STOP_S,
    PrivateCoordinator,
    reserve_port,
    stop_process,
    with_secret_file,
)
from strata.coord.server.tokens import Claims, TokenRole, Tokens
from strata.coord.view import JobView
from strata.coord.worker.relay import HeartbeatRelay
from strata.coord.worker.settings import SECTION, WorkerSettings

READY_S: Final = 60.0
"""How long the coordinator may take to answer at first."""
STACK_S: Final = 20.0
SIGNAL_S: Final = 2.0
"""How long a worker gets to print its stacks itself."""
LOOK_S: Final = 1.0
INTERRUPTED: Final = -signal.SIGINT
PHASE_S: Final = 60.0
"""Longer than most intervals of heartbeats."""
RELAY: Final = "STRATA_WORKER_RELAY"
DRAINED: Final = "STRATA_WORKER_DRAINED"
ADDRESS: Final = "STRATA_WORKER_ADDRESS"
JOB: Final = "STRATA_WORKER_JOB"
TOKENS_S: Final = 3650 * 86_400
"""Tokens of a private coordinator end with its secret, which is made anew for every run."""


class GangOptions(msgspec.Struct, frozen=True, kw_only=True):
    job: str
    workers: int
    """The number of workers on this host."""
    hosts: str = "1"
    """MIN:MAX, or a number."""
    folder: Path
    """The private coordinator's journal, log and tokens, and the stacks of hung workers."""
    coordinator: str | None = None
    """Its address; None: start one for this run alone."""
    local_address: str | None = None
    max_restarts: int = 10
    hang_after_s: float | None = None
    """Kill the workers of this host whose step has stood still for so long; None: only keep their stacks."""
    reset: bool = False
    finished_ok: bool = False
    """A job that is finished, by whichever hosts, is a success and not an error."""
    join_timeout_s: int = 600
    """How long to wait for the least number of hosts."""
    check_hosts: float | None = None
    """Exclude a host that is so many times slower than the others, or computes wrongly; None: check none."""
    torchrun: bool = True
    """Whether torchrun starts the workers; without torch `coord.local_workers` does, on one host."""
    program: tuple[str, ...] = ()


@dataclass(frozen=True)
class PrivateTokens:
    """Files of the coordinator of one run: a secret, and a token for each role. Only their owner can read them."""

    secret: Path
    worker: Path
    operator: Path

    @classmethod
    def write(cls, folder: Path, job: str, clock: Clock) -> PrivateTokens:
        files = cls(folder / "token.secret", folder / "worker.token", folder / "operator.token")
        secret = Secret(secrets.token_hex(32))
        write_file(files.secret, secret.reveal().encode())
        expires_s = round(clock.wall_s()) + TOKENS_S
        for file, role in ((files.worker, TokenRole.WORKER), (files.operator, TokenRole.OPERATOR)):
            write_file(file, Tokens(secret).issue(Claims(job, role, expires_s)).encode())
        return files


@dataclass(frozen=True)
class RendezvousFiles:
    """What torchrun's rendezvous leaves when it ends torchrun, whose exit status does not tell why."""

    failure: Path
    """Another rendezvous may succeed."""
    refusal: Path
    """This host must not take part."""

    @classmethod
    def below(cls, folder: Path) -> RendezvousFiles:
        return cls(folder / "rendezvous-failure.txt", folder / "rendezvous-refusal.txt")

    def remove(self) -> None:
        self.failure.unlink(missing_ok=True)
        self.refusal.unlink(missing_ok=True)

    def failure_reason(self, status: int) -> str:
        """Empty: torchrun ended well, or by its workers."""
        reason = _text(self.failure)[:200] if status else ""
        return f"failed in the rendezvous ({reason})" if reason else ""

    def refusal_reason(self) -> str:
        return _text(self.refusal)


def _text(file: Path) -> str:
    return file.read_text("utf-8", errors="replace") if file.exists() else ""


@dataclass
class _Standstill:
    incarnation: str
    step: int
    since_s: float


@dataclass
class HangWatch:
    """Finds workers that hang: the coordinator has said so, or the step of one that trains has stood still too long."""

    after_s: float | None
    _steps: dict[str, _Standstill] = field(default_factory=dict)
    _reported: set[tuple[str, int]] = field(default_factory=set)

    def reported(self, job: JobView) -> set[str]:
        """Named by the coordinator for the first time in this generation."""
        named = {(each.worker_id, each.generation) for each in job.incidents if each.kind == "HANG"}
        new = {(worker_id, generation) for worker_id, generation in named if generation == job.generation}
        new -= self._reported
        self._reported |= new
        return {worker_id for worker_id, _ in new}

    def overdue(self, job: JobView, now_s: float) -> set[str]:
        """Those that stand still for longer than allowed; each is named once for a standstill."""
        training = {
            each.worker_id: _Standstill(each.incarnation, each.step, now_s)
            for each in job.members
            if each.status == "TRAINING" and each.step is not None
        }
        for worker_id, seen in training.items():
            before = self._steps.get(worker_id)
            if before is not None and (before.incarnation, before.step) == (seen.incarnation, seen.step):
                training[worker_id] = before
        self._steps = training
        if self.after_s is None:
            return set()
        found = {worker_id for worker_id, each in training.items() if now_s - each.since_s >= self.after_s}
        for worker_id in found:
            training[worker_id].since_s = now_s
        return found


class GangLauncher:
    """One host's part of a gang from start to end. `say` gets lines for a person, `show` every state of the job."""

    def __init__(
        self, options: GangOptions, clock: Clock, say: Callable[[str], None], show: Callable[[JobView], None]
    ) -> None:
        self._options = options
        self._clock = clock
        self._say = say
        self._show = show
        self._hangs = HangWatch(options.hang_after_s)
        self._worker_count = options.workers
        """The number of workers without those that were drained."""
        self._tokens: PrivateTokens | None = None
        """None: the coordinator is not ours."""
        self._relay: Path | None = None
        self._drained: Path | None = None
        """Where workers of the running torchrun say that they are drained."""
        self._torchrun: asyncio.subprocess.Process | None = None
        self._workers: dict[str, psutil.Process] = {}
        """Last seen below torchrun: one that is killed may leave them behind."""
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self, coordinator_command: Sequence[str]) -> int:
        """The exit status of torchrun; INTERRUPTED if a signal ended the run."""
        options = self._options
        options.folder.mkdir(parents=True, exist_ok=True)
        async with AsyncExitStack() as stack:
            address = options.coordinator
            if address is None:
                self._tokens = PrivateTokens.write(private_folder(options.folder / "tokens"), options.job, self._clock)
                guard = stack.enter_context(reserve_port())
                address = f"127.0.0.1:{guard.getsockname()[1]}"
                stack.push_async_callback(self._stop_tasks)
                private = PrivateCoordinator(
                    command=coordinator_command, address=address, folder=options.folder, secret=self._tokens.secret
                )
                self._tasks.append(asyncio.create_task(private.keep(self._clock, self._say)))
                await self._wait_for_coordinator(guard.getsockname())
            settings = _operator_settings(address, options.job, self._tokens)
            operator = await stack.enter_async_context(Operator(settings, self._clock))
            if await self._is_finished(operator, address):
                self._say(f"job {options.job} has ended")
                return 0
            # The path of a socket must be short, and only this user may reach what is in it.
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="strata-gang-")))
            self._relay = await self._open_relay(stack, address, folder / "relay")
            self._drained = folder / "drained"
            self._drained.mkdir()
            # Before this a signal ends the process as usual; from here on workers get time to end.
            stop = asyncio.Event()
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, stop.set)
            watching = asyncio.create_task(self.watch(operator))
            running = asyncio.create_task(self._keep_torchrun(address))
            stopping = asyncio.create_task(stop.wait())
            try:
                await asyncio.wait({watching, running, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if watching.done():
                    # It ends only when the coordinator refuses us.
                    watching.result()
                return await self._judge(running.result(), operator) if running.done() else INTERRUPTED
            finally:
                await self._end(running, watching, stopping)

    async def _is_finished(self, operator: Operator, address: str) -> bool:
        """Says whether nothing is left to do; PRECONDITION if that is not what the caller wants."""
        jobs = {each.job_id: each for each in await operator.jobs()}
        access = ("--token-file", str(self._tokens.operator)) if self._tokens is not None else ()
        watch = shlex.join(("strata", "gang", self._options.job, "--watch", "--address", address, *access))
        self._say(f"to watch it: {watch}")
        known = jobs.get(self._options.job)
        if known is not None and self._options.reset:
            known = await operator.reset()
        if known is not None and known.status == "FINISHED":
            if self._options.finished_ok:
                return True
            raise StrataError(
                Code.PRECONDITION,
                f"job {known.job_id!r} is finished: run {known.run} has consumed all its data",
                hint="--reset runs it again from the beginning",
            )
        if known is not None and known.checkpoint_step is not None:
            self._say(f"job {known.job_id} goes on from the checkpoint of step {known.checkpoint_step}")
        return False

    async def _judge(self, status: int, operator: Operator) -> int:
        """A host that was cut off finds the job finished by the others when it is back: its own torchrun fails then."""
        if not status and self._worker_count:
            self._say(f"job {self._options.job} has ended")
        if not status or not self._options.finished_ok:
            return status
        try:
            jobs = {each.job_id: each.status for each in await operator.jobs()}
        except StrataError as error:
            self._say(f"whether other hosts finished the job is not known: {error.message}")
            return status
        if jobs.get(self._options.job) != "FINISHED":
            return status
        self._say(f"job {self._options.job} was finished by other hosts")
        return 0

    async def _open_relay(self, stack: AsyncExitStack, address: str, path: Path) -> Path | None:
        settings, phase_s = _worker_settings(address, self._options.job), random.uniform(0, PHASE_S)  # noqa: S311
        try:
            await stack.enter_async_context(HeartbeatRelay(settings, path, self._clock, phase_s))
        except (OSError, StrataError) as error:
            self._say(f"each worker sends its own heartbeats: {error}")
            return None
        return path

    # Processes

    async def _wait_for_coordinator(self, place: tuple[str, int]) -> None:
        until_s = self._clock.monotonic_s() + READY_S
        while True:
            try:
                _, writer = await asyncio.open_connection(*place)
            except OSError:
                if self._clock.monotonic_s() > until_s:
                    raise StrataError(
                        Code.UNAVAILABLE,
                        f"the coordinator did not start in {READY_S:g} s",
                        hint=f"its log is in {self._options.folder}",
                    ) from None
                await self._clock.sleep(0.1)
            else:
                writer.close()
                await writer.wait_closed()
                return

    async def _keep_torchrun(self, address: str) -> int:
        """Start it again if a drain, a signal or the rendezvous ended it; other ends are the result of the training."""
        files = RendezvousFiles.below(self._options.folder)
        failures = 0
        while True:
            files.remove()
            self._torchrun = process = await asyncio.create_subprocess_exec(
                *_launch_command(self._options, self._worker_count, address, files),
                env=self._worker_environment(address),
                start_new_session=True,
                preexec_fn=partial(end_with_parent, parent=os.getpid()),
            )
            status = await self._wait_for(process)
            self._kill_workers()
            if reason := files.refusal_reason():
                raise StrataError(Code.PRECONDITION, reason, hint="mend the host, or start all without --check-hosts")
            drained = self._drained_workers()
            # It ends well if the drained ones were all it had, or the others have finished the job.
            if drained and (status or len(drained) == self._worker_count):
                for each in drained:
                    each.unlink()
                self._worker_count -= len(drained)
                self._say(f"drained workers of this host: {len(drained)}; it goes on with {self._worker_count}")
                if not self._worker_count:
                    return 0
                continue
            failures += 1
            reason = f"was killed by signal {-status}" if status < 0 else files.failure_reason(status)
            if not reason or failures > self._options.max_restarts:
                return status
            self._say(f"torchrun {reason}: starting it again")
            await self._clock.sleep(BACKOFF.delay_s(failures, no_jitter()))

    async def _wait_for(self, torchrun: asyncio.subprocess.Process) -> int:
        """The status it ends with, or is ended with once drained workers are gone: it would start them again."""
        while True:
            try:
                async with asyncio.timeout(LOOK_S):
                    return await torchrun.wait()
            except TimeoutError:
                drained = self._drained_workers()
                if not drained or any(_is_running(int(each.name)) for each in drained):
                    continue
            if not self._workers_here():
                # It waits for the torchruns of other hosts to end too, and heeds no signal meanwhile.
                torchrun.kill()
            await stop_process(torchrun, STOP_S)

    def _drained_workers(self) -> list[Path]:
        """Files named after the processes of workers that were drained since torchrun was started."""
        return [*self._drained.iterdir()] if self._drained is not None else []

    def _worker_environment(self, address: str) -> Mapping[str, str]:
        """Relay and folder are those of this run; a run inside another one does not inherit them."""
        own = self._tokens
        found = process_environment() if own is None else with_secret_file("WORKER_TOKEN", own.worker)
        here = {RELAY: self._relay, DRAINED: self._drained, ADDRESS: address, JOB: self._options.job}
        others = {name: value for name, value in found.items() if name not in here}
        return others | {name: str(value) for name, value in here.items() if value is not None}

    async def _end(self, *tasks: asyncio.Task[int] | asyncio.Task[None] | asyncio.Task[bool]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        if self._torchrun is not None:
            await stop_process(self._torchrun, STOP_S)
            self._kill_workers()

    def _kill_workers(self) -> None:
        """Those that torchrun left behind: they would train on beside those that follow."""
        for process in self._workers.values():
            with suppress(psutil.Error):
                process.kill()
        self._workers = {}

    async def _stop_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    # Hung workers

    async def watch(self, operator: Operator) -> None:
        """Watch until the coordinator refuses us. No other error ends it: what only watches must not end the
        training."""
        refused: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def follow() -> None:
            try:
                await self._follow(operator)
            except StrataError as error:
                if error.code in (Code.FORBIDDEN, Code.UNAUTHENTICATED):
                    refused.set_exception(error)
                # Before its first worker has registered there is no job.
                elif error.code not in (Code.NOT_FOUND, Code.UNAVAILABLE):
                    raise

        following = asyncio.create_task(every(LOOK_S, follow, clock=self._clock, max_backoff_s=BACKOFF.most_s))
        try:
            await refused
        finally:
            following.cancel()
            await asyncio.wait({following})

    async def _follow(self, operator: Operator) -> None:
        async with aclosing(operator.watch()) as states:
            async for state in states:
                if isinstance(state, JobView):
                    self._show(state)
                    await self._see_to_hung(state)
                elif state.attempt == 1:
                    self._say(f"lost the coordinator: {state.reason}; trying again")

    async def _see_to_hung(self, job: JobView) -> None:
        overdue = self._hangs.overdue(job, self._clock.monotonic_s())
        suspects = overdue | self._hangs.reported(job)
        # Below a torchrun that was just killed there are none.
        self._workers = self._workers_here() or self._workers
        here = {worker_id: process for worker_id, process in self._workers.items() if worker_id in suspects}
        for worker_id, process in here.items():
            file = self._options.folder / "stacks" / f"generation-{job.generation}-{worker_id}.txt"
            how = await dump_stacks(process.pid, file)
            self._say(f"{worker_id} hangs: {how}")
        for worker_id in overdue & here.keys():
            try:
                here[worker_id].kill()
            except psutil.Error as error:
                self._say(f"{worker_id} could not be killed: {error}")
            else:
                self._say(f"{worker_id} was killed after {self._options.hang_after_s:g} s without a step")

    def _workers_here(self) -> dict[str, psutil.Process]:
        found = {}
        with suppress(psutil.Error):
            children = psutil.Process(self._torchrun.pid).children() if self._torchrun else ()
            for child in children:
                with suppress(psutil.Error):
                    found[f"rank-{child.environ()['RANK']}"] = child
        return found


async def dump_stacks(pid: int, file: Path) -> str:
    """Returns where the stacks of a process are: py-spy wrote them to the file, or the process itself to its stderr."""
    missing = ""
    try:
        stacks = await _stacks_by_py_spy(pid)
        if stacks is not None:
            await asyncio.to_thread(_write, file, stacks)
            return f"its stacks are in {file}"
    except OSError as error:
        missing = f"its stacks are not in {file}: {error.strerror}; "
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR1)
    await asyncio.sleep(SIGNAL_S)
    return f"{missing}its stacks are above, if it could still print them"


async def _stacks_by_py_spy(pid: int) -> bytes | None:
    """None: it is not installed, not allowed to look, or not done in time."""
    program = shutil.which("py-spy") or shutil.which("py-spy", path=Path(sys.executable).parent)
    if program is None:
        return None
    process = await asyncio.create_subprocess_exec(
        program, "dump", "--pid", str(pid), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(STACK_S):
            stacks, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        return None
    return stacks if process.returncode == 0 else None


def _write(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)


def _is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _launch_command(options: GangOptions, workers: int, address: str, files: RendezvousFiles) -> list[str]:
    if options.torchrun:
        return _torchrun_command(options, workers, address, files)
    own = (sys.executable, "-P", "-m", "strata.coord.local_workers")
    return [*own, str(workers), str(options.max_restarts), *options.program]


def _torchrun_command(options: GangOptions, workers: int, address: str, files: RendezvousFiles) -> list[str]:
    local = ("--local-addr", options.local_address) if options.local_address else ()
    rendezvous = {
        # A comma would begin the next setting.
        "failure_file": quote(str(files.failure)),
        "refusal_file": quote(str(files.refusal)),
        "join_timeout": options.join_timeout_s,
        **({"check_hosts": options.check_hosts} if options.check_hosts is not None else {}),
    }
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--rdzv-backend", "strata", "--rdzv-endpoint", address, "--rdzv-id", options.job),
        *("--rdzv-conf", ",".join(f"{name}={value}" for name, value in rendezvous.items())),
        *("--nnodes", options.hosts, "--nproc-per-node", str(workers)),
        *("--max-restarts", str(options.max_restarts), *local),
        # A torchrun that is killed leaves its workers; these the kernel ends, whatever they do.
        *("--no-python", *TIED_COMMAND, sys.executable, "-u", *options.program),
    ]


def _operator_settings(address: str, job: str, tokens: PrivateTokens | None) -> OperatorSettings:
    """Makes settings for looking at a job, which needs no other role than that of its workers; ours makes us the
    operator."""
    own = read_secret(tokens.operator) if tokens is not None else None
    found = _worker_settings(address, job)
    return OperatorSettings(address=address, job=job, token=own or found.token, tls=found.tls, patience_s=READY_S)


def _worker_settings(address: str, job: str) -> WorkerSettings:
    return load(WorkerSettings, section=SECTION, file=None, flags={"address": address, "job": job})
