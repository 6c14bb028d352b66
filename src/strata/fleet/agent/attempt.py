"""One attempt of a job on this host: prepare, run, watch, report, clean up; resumed where an earlier agent left it.

The files in the state folder say how far the attempt is, and each step can be repeated. The report comes last: first
the whole log and the metrics, then the files, then `complete` or `fail`. While the hub is away the report is retried,
and it survives this agent.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import subprocess
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import msgspec

from strata.base import log, trace
from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.fleet.agent import identity, supervised
from strata.fleet.agent.attempt_folder import AttemptPaths, newest_checkpoint, remove_folder
from strata.fleet.agent.exec_session import ExecSession, RunningJob, stop_leftovers
from strata.fleet.agent.gang_member import put_fetched, wanted_parts, write_token
from strata.fleet.agent.log_uploader import StreamUploader, last_metrics, read_log_tail
from strata.fleet.agent.outcome import classify_exit
from strata.fleet.agent.prepare import HostContext, prepare_attempt
from strata.fleet.agent.redaction import Redactor
from strata.fleet.agent.retry import BACKOFF, TRANSIENT, ThreadPools, retry, run_in, wait_or_timeout
from strata.fleet.agent.server_job import COPIES, data_tree, read_publication, relay_target, seal_state
from strata.fleet.agent.server_relay import ServerRelay, own_address
from strata.fleet.agent.state import AgentState, AttemptOutcome, AttemptPhase, AttemptRecord, StopOrder
from strata.fleet.agent.trainer_source import code_version
from strata.fleet.artifacts.files import Tree
from strata.fleet.artifacts.manifest import ArtifactKind, Lineage
from strata.fleet.client.artifact_transfer import download_as_tar, upload_folder
from strata.fleet.core.job import Cause
from strata.fleet.wire.leases import CompleteRequest, ExecPending, PublishRequest

POLL_S: Final = 0.2
UPLOAD_EVERY_S: Final = 0.5
FETCH_EVERY_S: Final = 1.0
LAST_LOG_S: Final = 10.0
"""Time limit for uploading the rest of the log of a dropped attempt."""
KILL_TIMEOUT_S: Final = 10.0
"""Time limit for ending a child that this host can no longer watch."""
ROOM_TIMEOUT_S: Final = 15.0
"""Time beyond the grace period that an attempt waits for jobs to end that the hub has ended already."""
_UPLOAD_ROUNDS: Final = 3
_MAX_ERROR: Final = 65_536
_LEASE_LOST: Final = frozenset({Code.STALE, Code.NOT_FOUND, Code.CONFLICT})
"""The next heartbeat's verdict will give the same reason, so it is not logged here."""
_SOURCE_ERRNOS: Final = frozenset(
    {
        errno.ENAMETOOLONG,
        errno.EINVAL,
        errno.EILSEQ,
        errno.ELOOP,
        errno.EACCES,
        errno.EPERM,
        errno.ENOTDIR,
        errno.EISDIR,
    }
)
"""OS errors that names and links in a source can cause on a healthy host."""
_log = log.get(__name__)


class Attempt:
    def __init__(
        self,
        record: AttemptRecord,
        state: AgentState,
        host: HostContext,
        pools: ThreadPools,
        *,
        has_room: Callable[[AttemptRecord], bool] = lambda _: True,
        on_started: Callable[[], None] = lambda: None,
    ) -> None:
        self.record = record
        self._state = state
        self._host = host
        self._pools = pools
        self._has_room = has_room
        """Whether what this attempt takes of the host is free of other children."""
        self._on_started = on_started
        """Called when the child has started, so that the hub learns of it soon."""
        self._folder = state.folder_of(record)
        self._paths = AttemptPaths(host.attempts / record.key)
        self._process: subprocess.Popen[bytes] | None = None
        self._child_ended = asyncio.Event()
        self._execs: dict[str, asyncio.Task[None]] = {}
        """Commands of people that run beside the child, by their id."""
        self._published: PublishRequest | None = None
        self._relay: ServerRelay | None = None
        """Relays to a server that the hub reaches from another machine."""
        self._not_published = ""
        """Why the hub has not taken the address of a server, to be logged once."""
        self._token_at_s: float | None = None
        """When the token of a member of a gang was renewed last, by this agent."""
        self._dropped = asyncio.Event()
        """The hub expects no report: retries are cancelled."""
        lease = record.lease
        self._redactor = Redactor(lease.secrets.values())
        self._log = StreamUploader(host.hub, lease, "log", self._folder / supervised.LOG, self._redactor)
        self._metrics = StreamUploader(host.hub, lease, "metrics", self._paths.metrics, self._redactor)

    @property
    def running(self) -> bool:
        outcome = self.record.outcome
        return self.record.phase is AttemptPhase.RUNNING or (outcome is not None and "exit" in outcome.facts)

    @property
    def ended(self) -> bool:
        """The child has ended, or there was none; only the report is left."""
        return self.record.phase is AttemptPhase.ENDED

    @property
    def occupies(self) -> bool:
        """Its child may live."""
        return self.record.phase in (AttemptPhase.STARTING, AttemptPhase.RUNNING)

    @property
    def dropped(self) -> bool:
        """Dropped by this agent process: one that died after saving the order may not have ended the child."""
        return self._dropped.is_set()

    @property
    def supervisor_pid(self) -> int:
        pids = supervised.read_pids(self._folder)
        return 0 if pids is None else pids.supervisor

    def needs_token(self, now_s: float) -> bool:
        """Says whether the workers of this member of a gang need another token soon; its age is unknown at first."""
        gang = self.record.lease.gang
        if gang is None or not gang.token or not self.occupies:
            return False
        return self._token_at_s is None or now_s - self._token_at_s > gang.token_s / 3

    async def renew_token(self, token: str, now_s: float) -> None:
        try:
            await run_in(self._pools.work, write_token, self._paths, token, self._host.job_user)
        except OSError as error:
            # The next heartbeat brings another one.
            _log.warning("token_not_renewed", job=self.record.lease.job_id, reason=str(error))
            return
        self._token_at_s = now_s

    async def run(self) -> None:
        """Returns when the hub has the outcome and nothing of the attempt is left on this host."""
        lease = self.record.lease
        # Its task was started inside the span of the claim, and continues that trace.
        with trace.span("attempt", job=lease.job_id, epoch=lease.epoch):
            await self._run()

    async def _run(self) -> None:
        try:
            if self.record.phase is AttemptPhase.PREPARING:
                await self._prepare()
            if self.occupies:
                stop_leftovers(self._folder)
                await self._watch()
            outcome = self.record.outcome
            assert outcome is not None, "an attempt that is over has an outcome"
        except Exception as error:  # noqa: BLE001 - the outermost handler of an attempt: reported now, another host takes it
            # A full or missing disk, or a bug in the agent: in either case not the job's fault.
            _log.exception("attempt_failed_on_host", job=self.record.lease.job_id)
            await self._kill_child()
            outcome = AttemptOutcome(cause=Cause.INFRA, error=f"the host failed: {error!r}")
        await self._report(outcome)
        self._child_ended.set()
        if self._execs:
            await asyncio.wait(self._execs.values())
        self._clean_up()

    def start_exec(self, pending: ExecPending) -> None:
        """Run a command of a person beside the child. The hub repeats it in each heartbeat until it has ended."""
        if self.record.phase is not AttemptPhase.RUNNING or pending.id in self._execs:
            return
        job = RunningJob(self.record.lease, self._folder, self._paths, self._redactor, self._child_ended)
        task = asyncio.create_task(ExecSession(pending, job, self._host, self._pools).run(), name=pending.id)
        self._execs[pending.id] = task
        task.add_done_callback(lambda _: self._execs.pop(pending.id))

    def stop(self, stop: StopOrder, grace_s: float) -> None:
        """End the child. Of two orders the first one counts, unless the second drops the attempt."""
        earlier = self.record.stop
        if earlier is None or (stop.drop and not earlier.drop):
            self._save(stop=stop)
            failpoint("agent.stop.written")
        if self.record.phase is AttemptPhase.ENDED and not stop.drop:
            return
        if stop.drop:
            self._dropped.set()
        self._request_stop(grace_s)

    def _request_stop(self, grace_s: float) -> None:
        if self._folder.exists():
            supervised.request_stop(self._folder, grace_s)

    async def _kill_child(self) -> None:
        """Kills the child before the hub may give the job to another host; also on a disk where the stop request cannot
        be written."""
        for _ in range(round(KILL_TIMEOUT_S / POLL_S)):
            with suppress(OSError, StrataError):
                self._request_stop(0.0)
            with suppress(OSError, StrataError):
                supervised.kill_orphans(self._folder)
            if not supervised.is_supervised(self._folder, self._process):
                await run_in(self._pools.work, supervised.remove_container, self._folder)
                return
            await asyncio.sleep(POLL_S)
        _log.error("child_not_killed", job=self.record.lease.job_id)

    async def _prepare(self) -> None:
        lease, traceparent = self.record.lease, trace.traceparent()
        busy = AttemptOutcome(cause=Cause.INFRA, error="jobs that the hub has ended still run on this host")
        # The preparation of a server replaces its data folder, in which an earlier attempt may still run.
        if self._is_server and not await self._wait_for_room():
            self._finish(self._unless_stopped(busy))
            return
        try:
            prepared = await retry(
                self._pools.prepare,
                "prepare",
                lambda: prepare_attempt(
                    self._host,
                    lease,
                    self._paths,
                    self.record.devices,
                    lambda: self.record.stop is None,
                    traceparent=traceparent,
                ),
                cancelled=self._dropped,
            )
        except StrataError as error:
            # A hub or network that is away is retried; everything else is missing on this host.
            cause = Cause.INFRA if error.code in TRANSIENT else Cause.SETUP_ERROR
            self._finish(self._unless_stopped(AttemptOutcome(cause=cause, error=f"cannot prepare: {error}")))
            return
        except OSError as error:
            if error.errno not in _SOURCE_ERRNOS:
                raise
            self._finish(
                self._unless_stopped(AttemptOutcome(cause=Cause.SETUP_ERROR, error=f"cannot prepare: {error}"))
            )
            return
        has_room = await self._wait_for_room()
        if self.record.stop is not None or not has_room:
            self._finish(self._unless_stopped(busy))
            return
        # Nothing is awaited until the phase is saved: of two attempts that wait for the same room one gets it.
        supervised.write_spec(self._folder, prepared.spec)
        code = code_version(lease.trainer) if lease.trainer else ""
        self._save(phase=AttemptPhase.STARTING, code=code, prepared=prepared.facts)
        failpoint("agent.attempt.starting")
        self._process = supervised.start_supervisor(self._folder)
        failpoint("agent.attempt.started")

    async def _wait_for_room(self) -> bool:
        """Says whether there is room now. The hub gives away what an ended job had before its child has ended."""
        polls = round((self._host.settings.grace_s + ROOM_TIMEOUT_S) / POLL_S)
        while not self._has_room(self.record) and self.record.stop is None and polls:
            polls -= 1
            await asyncio.sleep(POLL_S)
        return self._has_room(self.record)

    async def _watch(self) -> None:
        moving = [asyncio.create_task(self._upload_until_ended())]
        if self.record.lease.gang is not None:
            moving.append(asyncio.create_task(self._fetch_until_ended()))
        try:
            status = await self._until_ended()
            tail = await run_in(self._pools.work, read_log_tail, self._folder / supervised.LOG)
            spec = await run_in(self._pools.work, supervised.read_spec, self._folder)
            outcome = classify_exit(
                status,
                tail,
                stop=self.record.stop,
                timeout_s=self.record.lease.spec.timeout_s,
                limits=None if spec is None else spec.limits,
            )
            if outcome.cause is None and self._is_server:
                outcome = AttemptOutcome(cause=Cause.USER_ERROR, error="the server has ended", facts=outcome.facts)
            self._finish(outcome)
            failpoint("agent.attempt.ended")
        finally:
            self._child_ended.set()
            await self._close_relay()
            await asyncio.gather(*moving)

    async def _until_ended(self) -> supervised.ChildExit | supervised.SupervisorLost:
        while True:
            status = supervised.read_status(self._folder, self._process)
            match status:
                case supervised.ChildExit():
                    return status
                case supervised.SupervisorLost():
                    supervised.kill_orphans(self._folder)
                    await run_in(self._pools.work, supervised.remove_container, self._folder)
                    return status
                case supervised.ChildNotStarted() if self._process is None:
                    # An earlier agent died just before or after it started the supervisor.
                    self._process = supervised.start_supervisor(self._folder)
                case supervised.ChildRunning() if self.record.phase is not AttemptPhase.RUNNING:
                    failpoint("agent.attempt.seen")
                    self._save(phase=AttemptPhase.RUNNING)
                    self._on_started()
                case supervised.ChildRunning() if self._is_server:
                    await self._publish_server()
                case _:
                    pass
            await asyncio.sleep(POLL_S)

    async def _publish_server(self) -> None:
        """Tell the hub where the server serves, once for each address. A hub that is away is told at the next poll."""
        lease, work = self.record.lease, self._host.settings.work_folder
        try:
            found = await run_in(
                self._pools.work, lambda: read_publication(lease, self._paths, work, uid=self._host.uid)
            )
            if self._relay is not None:
                self._relay.reload()
            if found is None or found == self._published:
                return
            await run_in(self._pools.work, self._host.hub.publish, lease, await self._reachable(found))
        except (StrataError, OSError) as error:
            if str(error) != self._not_published:
                _log.warning("server_not_published", job=lease.job_id, reason=str(error))
            self._not_published = str(error)
            return
        self._published = found
        _log.info("server_published", job=lease.job_id, epoch=lease.epoch, models=list(found.models))

    async def _reachable(self, found: PublishRequest) -> PublishRequest:
        """The same server, at an address that the hub reaches: for one on another machine, that of a relay."""
        settings = self._host.settings
        if self._host.is_local:
            return found
        target = relay_target(settings.work_folder, self.record.lease, found)
        if self._relay is None or self._relay.target != target:
            files = await run_in(self._pools.work, identity.serving_files, settings.state_folder)
            if files is None:
                raise StrataError(Code.UNAVAILABLE, "the hub has not given this host a certificate for servers yet")
            await self._close_relay()
            url = identity.load_membership(settings.state_folder).url
            host = settings.advertise or await run_in(self._pools.work, own_address, url)
            self._relay = await ServerRelay.open(files, target, host)
        return msgspec.structs.replace(found, address=self._relay.address)

    async def _close_relay(self) -> None:
        if self._relay is not None:
            await self._relay.close()
            self._relay = None

    async def _upload_until_ended(self) -> None:
        failures = 0
        while not self._child_ended.is_set():
            try:
                moved = await run_in(self._pools.work, self._upload_streams)
                await self._upload_checkpoint()
                failures = 0
                await wait_or_timeout(self._child_ended, 0.0 if moved else UPLOAD_EVERY_S)
            except StrataError as error:
                # Nothing is lost: the files stay on the disk, and the report sends the rest.
                failures += 1
                if error.code not in TRANSIENT | _LEASE_LOST:
                    _log.warning("stream_upload_failed", job=self.record.lease.job_id, reason=error.message)
                await wait_or_timeout(self._child_ended, BACKOFF.delay_s(failures, 0.5))

    async def _fetch_until_ended(self) -> None:
        """Download the parts of checkpoints that the workers of a gang wait for, as soon as all members have them
        uploaded."""
        failures = 0
        while not await wait_or_timeout(
            self._child_ended, BACKOFF.delay_s(failures, 0.5) if failures else FETCH_EVERY_S
        ):
            try:
                await run_in(self._pools.work, self._fetch_parts)
                failures = 0
            except (StrataError, OSError) as error:
                failures += 1
                _log.warning("checkpoint_not_fetched", job=self.record.lease.job_id, reason=str(error))

    def _fetch_parts(self) -> None:
        hub, lease = self._host.hub, self.record.lease
        for name, parts in wanted_parts(self._paths, self._host.uid):
            artifacts = hub.find_parts(lease, parts)
            if artifacts:
                fetch = functools.partial(download_as_tar, hub)
                put_fetched(self._paths, name, artifacts, fetch, self._host.job_user)
                _log.info("checkpoint_fetched", job=lease.job_id, epoch=lease.epoch, artifacts=len(artifacts))

    def _upload_streams(self) -> bool:
        moved = self._log.upload_new()
        return self._metrics.upload_new() or moved

    async def _upload_checkpoint(self) -> None:
        """Upload the newest checkpoint, once. One that cannot become an artifact is skipped, and the job goes on."""
        name = newest_checkpoint(self._tree(*self._checkpoints), self.record.sent)
        if not name:
            return
        artifact = ""
        try:
            artifact = await run_in(
                self._pools.work, self._upload_folder, (*self._checkpoints, name), ArtifactKind.CHECKPOINT
            )
        except StrataError as error:
            if error.code is not Code.INVALID:
                raise
            _log.warning("checkpoint_rejected", job=self.record.lease.job_id, name=name, reason=error.message)
        self._save(sent=(*self.record.sent, name)[-100:], checkpoint=artifact or self.record.checkpoint)
        failpoint("agent.attempt.checkpointed")

    async def _report(self, outcome: AttemptOutcome) -> None:
        try:
            if outcome.drop or self._dropped.is_set():
                await self._upload_last_log()
                return
            await self._retry("upload_log", lambda: self._log.upload_new(last=True))
            outcome = await self._upload_metrics(outcome)
            failpoint("agent.attempt.logged")
            await self._report_outcome(outcome)
        except StrataError as error:
            # Stale, ended or unknown: the hub has decided about this job otherwise, as for a trial that it pruned.
            write_log = _log.debug if error.code in _LEASE_LOST else _log.warning
            write_log("attempt_report_refused", job=self.record.lease.job_id, reason=error.message)

    async def _upload_metrics(self, outcome: AttemptOutcome) -> AttemptOutcome:
        """The outcome: a job that replaced its metrics file by a pipe or a link has not completed."""
        try:
            await self._retry("upload_metrics", lambda: self._metrics.upload_new(last=True))
        except StrataError as error:
            if error.code is not Code.INVALID:
                raise
            if outcome.cause is None:
                return AttemptOutcome(
                    cause=Cause.USER_ERROR, error=f"the metrics cannot be kept: {error}", facts=outcome.facts
                )
        return outcome

    async def _report_outcome(self, outcome: AttemptOutcome) -> None:
        if outcome.cause is None:
            outcome = await self._complete(outcome)
        if outcome.cause is not None:
            await self._fail(outcome, outcome.cause)

    async def _complete(self, outcome: AttemptOutcome) -> AttemptOutcome:
        """The final outcome: a result that cannot be uploaded is no success."""
        metrics = await run_in(self._pools.work, last_metrics, self._paths.metrics)
        for _ in range(_UPLOAD_ROUNDS):
            try:
                artifact = await self._retry(
                    "upload_result", lambda: self._upload_folder(("output",), ArtifactKind.RESULT, metrics)
                )
            except StrataError as error:
                if error.code is Code.STALE:
                    raise
                # File names that not every system can hold are the trainer's fault; the rest is ours.
                cause = Cause.USER_ERROR if error.code is Code.INVALID else Cause.INFRA
                return AttemptOutcome(cause=cause, error=f"the result cannot be kept: {error}", facts=outcome.facts)
            failpoint("agent.attempt.uploaded")
            if await self._report_complete(artifact, metrics, outcome):
                return outcome
        return AttemptOutcome(cause=Cause.INFRA, error="the hub loses the result again and again", facts=outcome.facts)

    async def _report_complete(self, artifact: str, metrics: dict[str, float], outcome: AttemptOutcome) -> bool:
        """Says whether the hub has the artifact and accepted the report."""
        lease = self.record.lease
        request = CompleteRequest(epoch=lease.epoch, artifact=artifact, metrics=metrics, facts=self._facts(outcome))
        try:
            await self._retry("complete", lambda: self._host.hub.complete(lease, request))
        except StrataError as error:
            if error.code is Code.PRECONDITION and artifact:
                return False
            raise
        failpoint("agent.attempt.completed")
        _log.info("attempt_completed", job=lease.job_id, epoch=lease.epoch, artifact=artifact)
        return True

    async def _save_state(self) -> None:
        """Upload the data folder of a server that has ended, so that another host can continue with it. While the hub
        is away this is retried: the lease is held until the report."""
        lease, host = self.record.lease, self._host

        def upload() -> str:
            if not seal_state(lease, host.settings.work_folder, host.job_user):
                return ""
            return self._upload_folder((), ArtifactKind.CHECKPOINT)

        artifact = await self._retry("save_state", upload)
        failpoint("agent.server.saved")
        if artifact:
            self._save(checkpoint=artifact)
            _log.info("server_state_saved", job=lease.job_id, epoch=lease.epoch, artifact=artifact)

    async def _fail(self, outcome: AttemptOutcome, cause: Cause) -> None:
        """Try to upload a last checkpoint for the next attempt; the report does not wait for it."""
        lease = self.record.lease
        try:
            await (self._save_state() if self._is_server else self._upload_checkpoint())
        except (StrataError, OSError) as error:
            _log.warning("last_checkpoint_not_uploaded", job=lease.job_id, reason=str(error))
        error_text = self._redactor.redact_text(outcome.error)[:_MAX_ERROR]
        facts = self._facts(outcome)
        failpoint("agent.fail.before")
        await self._retry("fail", lambda: self._host.hub.fail(lease, cause, error_text, facts))
        failpoint("agent.fail.told")
        _log.info("attempt_failed", job=lease.job_id, epoch=lease.epoch, cause=cause.value)

    def _facts(self, outcome: AttemptOutcome) -> dict[str, Any]:
        lineage = {"code": self.record.code, "checkpoint": self.record.checkpoint}
        return outcome.facts | self.record.prepared | {name: value for name, value in lineage.items() if value}

    @property
    def _is_server(self) -> bool:
        return self.record.lease.spec.kind == "server"

    @property
    def _checkpoints(self) -> tuple[str, ...]:
        """Returns where the child puts its checkpoints."""
        return (COPIES,) if self._is_server else (self._paths.checkpoints.name,)

    def _tree(self, *inside: str) -> Tree:
        """A folder below that of the attempt; of a server, below that of its data, which outlives the attempt."""
        if not self._is_server:
            return Tree(self._paths.folder, inside, uid=self._host.uid)
        data = data_tree(self._host.settings.work_folder, self.record.lease.job_id, self._host.uid)
        return Tree(data.base, (*data.inside, *inside), uid=data.uid)

    def _upload_folder(
        self, inside: tuple[str, ...], kind: ArtifactKind, metrics: dict[str, float] | None = None
    ) -> str:
        return upload_folder(
            self._host.hub,
            self._tree(*inside),
            self.record.lease,
            self._lineage(kind, metrics or {}),
            wanted=lambda: not self._dropped.is_set(),
        )

    async def _upload_last_log(self) -> None:
        """Upload the rest of the log of a dropped attempt, for people who read why it ended; one try."""
        try:
            async with asyncio.timeout(LAST_LOG_S):
                await run_in(self._pools.work, lambda: self._log.upload_new(last=True))
        except (StrataError, TimeoutError) as error:
            _log.info("last_log_not_uploaded", job=self.record.lease.job_id, reason=str(error))

    async def _retry(self, operation: str, call: Callable[[], Any]) -> Any:
        return await retry(self._pools.work, operation, call, cancelled=self._dropped)

    def _lineage(self, kind: ArtifactKind, metrics: dict[str, float]) -> Lineage:
        lease = self.record.lease
        parents = (lease.checkpoint,) if lease.checkpoint else ()
        return Lineage(
            kind=kind,
            model=lease.spec.model,
            mode=lease.spec.mode,
            metrics=metrics,
            code=self.record.code[:256],
            data=lease.spec.data[:256],
            parents=parents,
        )

    def _unless_stopped(self, outcome: AttemptOutcome) -> AttemptOutcome:
        stop = self.record.stop
        return outcome if stop is None else AttemptOutcome(cause=stop.cause, error=stop.reason, drop=stop.drop)

    def _finish(self, outcome: AttemptOutcome) -> None:
        self._save(phase=AttemptPhase.ENDED, outcome=outcome)

    def _save(self, **changes: Any) -> None:
        self.record = msgspec.structs.replace(self.record, **changes)
        self._state.save(self.record)

    def _clean_up(self) -> None:
        self._state.remove(self.record)
        try:
            remove_folder(self._paths.folder)
        except StrataError as error:
            _log.warning("attempt_folder_not_removed", job=self.record.lease.job_id, reason=error.message)
