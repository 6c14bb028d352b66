"""Reports an attempt to the hub: uploads of log, metrics and checkpoints while it runs (every 0.5 s), then result and
outcome, retried while the hub is away.

The report comes last: first the whole log and the metrics, then the files, then `complete` or `fail`. While the hub is
away the report is retried, and it survives this agent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from msgspec.structs import replace

from strata.base import log
from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.fleet.agent import supervised
from strata.fleet.agent.attempt_folder import AttemptPaths, newest_checkpoint
from strata.fleet.agent.log_uploader import StreamUploader, last_metrics
from strata.fleet.agent.prepare import HostContext
from strata.fleet.agent.redaction import Redactor
from strata.fleet.agent.retry import BACKOFF, TRANSIENT, ThreadPools, retry, run_in, wait_or_timeout
from strata.fleet.agent.server_job import COPIES, data_tree, seal_state
from strata.fleet.agent.state import AttemptOutcome, SavedRecord
from strata.fleet.artifacts.files import Tree
from strata.fleet.artifacts.manifest import ArtifactKind, Lineage
from strata.fleet.client.artifact_transfer import upload_folder
from strata.fleet.core.job import Cause
from strata.fleet.wire.leases import CompleteRequest

UPLOAD_EVERY_S: Final = 0.5
LAST_LOG_S: Final = 10.0
"""Time limit for uploading the rest of the log of a dropped attempt."""
_UPLOAD_ROUNDS: Final = 3
_MAX_ERROR: Final = 65_536
_LEASE_LOST: Final = frozenset({Code.STALE, Code.NOT_FOUND, Code.CONFLICT})
"""The next heartbeat's verdict will give the same reason, so it is not logged here."""
_log = log.get(__name__)


class AttemptReporter:
    """`dropped` is set when the hub expects no report: retries are cancelled."""

    def __init__(
        self, saved: SavedRecord, paths: AttemptPaths, host: HostContext, pools: ThreadPools, dropped: asyncio.Event
    ) -> None:
        lease = saved.record.lease
        self.redactor = Redactor(lease.secrets.values())
        self._saved = saved
        self._lease = lease
        self._is_server = lease.spec.kind == "server"
        self._checkpoints = (COPIES,) if self._is_server else (paths.checkpoints.name,)
        """Where the child puts its checkpoints."""
        self._paths = paths
        self._host = host
        self._pools = pools
        self._dropped = dropped
        self._log = StreamUploader(host.hub, lease, "log", saved.folder / supervised.LOG, self.redactor)
        self._metrics = StreamUploader(host.hub, lease, "metrics", paths.metrics, self.redactor)

    async def upload_until(self, ended: asyncio.Event) -> None:
        failures = 0
        while not ended.is_set():
            try:
                moved = await run_in(self._pools.work, self._upload_streams)
                await self._upload_checkpoint()
                failures = 0
                await wait_or_timeout(ended, 0.0 if moved else UPLOAD_EVERY_S)
            except StrataError as error:
                # Nothing is lost: the files stay on the disk, and the report sends the rest.
                failures += 1
                if error.code not in TRANSIENT | _LEASE_LOST:
                    _log.warning("stream_upload_failed", job=self._lease.job_id, reason=error.message)
                await wait_or_timeout(ended, BACKOFF.delay_s(failures, 0.5))

    def _upload_streams(self) -> bool:
        moved = self._log.upload_new()
        return self._metrics.upload_new() or moved

    async def _upload_checkpoint(self) -> None:
        """Upload the newest checkpoint, once. One that cannot become an artifact is skipped, and the job goes on."""
        name = newest_checkpoint(self._tree(*self._checkpoints), self._saved.record.sent)
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
            _log.warning("checkpoint_rejected", job=self._lease.job_id, name=name, reason=error.message)
        record = self._saved.record
        self._saved.change(sent=(*record.sent, name)[-100:], checkpoint=artifact or record.checkpoint)
        failpoint("agent.attempt.checkpointed")

    async def report(self, outcome: AttemptOutcome) -> None:
        try:
            if outcome.drop or self._dropped.is_set():
                await self._upload_last_log()
                return
            await self._retry("upload_log", lambda: self._log.upload_new(last=True))
            outcome = await self._upload_metrics(outcome)
            failpoint("agent.attempt.logged")
            if outcome.cause is None:
                outcome = await self._complete(outcome)
            if outcome.cause is not None:
                await self._fail(outcome, outcome.cause)
        except StrataError as error:
            # Stale, ended or unknown: the hub has decided about this job otherwise, as for a trial that it pruned.
            write_log = _log.debug if error.code in _LEASE_LOST else _log.warning
            write_log("attempt_report_refused", job=self._lease.job_id, reason=error.message)

    async def _upload_metrics(self, outcome: AttemptOutcome) -> AttemptOutcome:
        """The outcome: a job that replaced its metrics file by a pipe or a link has not completed."""
        try:
            await self._retry("upload_metrics", lambda: self._metrics.upload_new(last=True))
        except StrataError as error:
            if error.code is not Code.INVALID:
                raise
            if outcome.cause is None:
                return replace(outcome, cause=Cause.USER_ERROR, error=f"the metrics cannot be kept: {error}")
        return outcome

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
                return replace(outcome, cause=cause, error=f"the result cannot be kept: {error}")
            failpoint("agent.attempt.uploaded")
            if await self._report_complete(artifact, metrics, outcome):
                return outcome
        return replace(outcome, cause=Cause.INFRA, error="the hub loses the result again and again")

    async def _report_complete(self, artifact: str, metrics: dict[str, float], outcome: AttemptOutcome) -> bool:
        """Says whether the hub has the artifact and accepted the report."""
        lease = self._lease
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
        lease, host = self._lease, self._host

        def upload() -> str:
            if not seal_state(lease, host.settings.work_folder, host.job_user):
                return ""
            return self._upload_folder((), ArtifactKind.CHECKPOINT)

        artifact = await self._retry("save_state", upload)
        failpoint("agent.server.saved")
        if artifact:
            self._saved.change(checkpoint=artifact)
            _log.info("server_state_saved", job=lease.job_id, epoch=lease.epoch, artifact=artifact)

    async def _fail(self, outcome: AttemptOutcome, cause: Cause) -> None:
        """Try to upload a last checkpoint for the next attempt; the report does not wait for it."""
        lease = self._lease
        try:
            await (self._save_state() if self._is_server else self._upload_checkpoint())
        except (StrataError, OSError) as error:
            _log.warning("last_checkpoint_not_uploaded", job=lease.job_id, reason=str(error))
        error_text = self.redactor.redact_text(outcome.error)[:_MAX_ERROR]
        facts = self._facts(outcome)
        failpoint("agent.fail.before")
        await self._retry("fail", lambda: self._host.hub.fail(lease, cause, error_text, facts))
        failpoint("agent.fail.told")
        _log.info("attempt_failed", job=lease.job_id, epoch=lease.epoch, cause=cause.value)

    def _facts(self, outcome: AttemptOutcome) -> dict[str, Any]:
        record = self._saved.record
        lineage = {"code": record.code, "checkpoint": record.checkpoint}
        return outcome.facts | record.prepared | {name: value for name, value in lineage.items() if value}

    def _tree(self, *inside: str) -> Tree:
        """A folder below that of the attempt; of a server, below that of its data, which outlives the attempt."""
        if not self._is_server:
            return Tree(self._paths.folder, inside, uid=self._host.uid)
        data = data_tree(self._host.settings.work_folder, self._lease.job_id, self._host.uid)
        return Tree(data.base, (*data.inside, *inside), uid=data.uid)

    def _upload_folder(
        self, inside: tuple[str, ...], kind: ArtifactKind, metrics: dict[str, float] | None = None
    ) -> str:
        lease = self._lease
        lineage = Lineage(
            kind=kind,
            model=lease.spec.model,
            mode=lease.spec.mode,
            metrics=metrics or {},
            code=self._saved.record.code[:256],
            data=lease.spec.data[:256],
            parents=(lease.checkpoint,) if lease.checkpoint else (),
        )
        tree = self._tree(*inside)
        return upload_folder(self._host.hub, tree, lease, lineage, wanted=lambda: not self._dropped.is_set())

    async def _upload_last_log(self) -> None:
        """Upload the rest of the log of a dropped attempt, for people who read why it ended; one try."""
        try:
            async with asyncio.timeout(LAST_LOG_S):
                await run_in(self._pools.work, lambda: self._log.upload_new(last=True))
        except (StrataError, TimeoutError) as error:
            _log.info("last_log_not_uploaded", job=self._lease.job_id, reason=str(error))

    async def _retry(self, operation: str, call: Callable[[], Any]) -> Any:
        return await retry(self._pools.work, operation, call, cancelled=self._dropped)
