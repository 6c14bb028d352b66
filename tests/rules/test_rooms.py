"""The room test: where a change belongs. A reader who knows only the list of files should open the module named here.

Each line is a change as a maintainer would say it, the module to open, and the symbol there that implements it. The
test keeps the list true when code moves. Give the changes and `git ls-files src` to a reader who has not seen the
project: what they miss shows which module has the wrong name.
"""

from __future__ import annotations

import ast
from typing import Final, NamedTuple

import pytest

from tests.rules.language import sources


class Room(NamedTuple):
    change: str
    module: str
    symbol: str


ROOMS: Final = (
    # The fleet: hub and agents.
    Room("a lease expires and its job is pending again", "fleet.core.lease", "after_expiry"),
    Room("a claim is refused because the host has too little VRAM", "fleet.core.match", "_gpus"),
    Room("a host is quarantined after infrastructure failures", "fleet.core.lease", "quarantine"),
    Room("what `strata apply` changes, creates and leaves alone", "fleet.core.plan", "plan"),
    Room("a column of the job table in SQLite", "fleet.store.sqlite.tables", "COMPONENT"),
    Room("an HTTP route on the hub", "fleet.http.routes", "ROUTES"),
    Room("a request of the tinker protocol at the hub is forwarded", "hub.gateway.servers", "forward"),
    Room("a gang as the hub shows it", "coord.view", "GangView"),
    Room("which artifacts are kept", "fleet.artifacts.retention", "choose_retained"),
    Room("an event kind, and the words for people about it", "database.event_kinds", "HOST_LOST"),
    Room("in what order jobs leave the queue", "fleet.store.queue", "queue_order"),
    Room("a webhook is retried", "hub.webhooks", "WebhookDispatcher"),
    Room("the agent's retry backoff", "fleet.agent.retry", "BACKOFF"),
    Room("where uv gets packages and its cache from", "fleet.agent.uv", "build_variables"),
    Room("a job's process is killed with its descendants", "fleet.agent.supervisor", "ChildMonitor._kill_descendants"),
    # The coordinator of gang-scheduled training.
    Room("a worker is evicted because it is silent", "coord.core.liveness", "evict_expired"),
    Room("a barrier times out", "coord.core.barriers", "time_out"),
    Room("how many checkpoints of a gang are kept", "coord.core.job_config", "JobConfig"),
    Room("the size of a gRPC message", "coord.grpc_options", "MAX_REQUEST_BYTES"),
    Room("a slow worker counts as a straggler", "coord.core.straggler_detection", "judge"),
    Room("the order of samples in an epoch", "coord.core.permutation", "Order"),
    Room("a heartbeat is received", "coord.server.heartbeat", "HeartbeatHandler"),
    # Shared below the layers.
    Room("appends of many callers become one commit", "journal.group_commit", "Writer._commit"),
    Room("how long to wait between attempts after a failover", "journal.failover", "BACKOFF"),
    Room("an API key is verified, in the hub and in the training server", "identity.authenticate", "Authenticator"),
    Room("how long a session of the dashboard lasts", "identity.sessions", "SESSION_S"),
    Room("when a certificate is renewed", "identity.renewal", "HUB_PART"),
    Room("a file is replaced so that a crash leaves the old or the new one", "base.atomic", "write_file"),
    Room("the exit status of a command for an error", "cli.exit_codes", "EXIT_CODE_OF"),
    # The training server: decisions.
    Room("fair share between tenants", "train.core.scheduler", "Scheduler"),
    Room("results of operations expire", "train.core.future", "FutureStore.expire"),
    Room("a checkpoint is deleted after its TTL", "train.core.checkpoint_retention", "delete_expired"),
    Room("an operation is rejected because of a quota", "train.core.admission", "admit"),
    Room("datums are packed into rows", "train.core.pack", "pack"),
    Room("the estimated time until a queued operation runs", "train.status.throughput", "ThroughputEstimate"),
    Room("when a snapshot of all models is due", "train.core.snapshots", "due_reason"),
    Room("an optimizer step is replayed after a crash, and compared", "train.core.replay", "divergence"),
    Room("sampling takes turns with training", "train.core.sampling_slices", "next_slice"),
    # The training server: orchestrator and its links.
    Room("hung ranks are detected", "train.orchestrator.rank_session", "RankSession._watch_timeout"),
    Room("journal compaction", "train.orchestrator.maintenance.compaction", "Compaction"),
    Room("a client that is gone loses its session", "train.orchestrator.maintenance.session_reaper", "SessionReaper"),
    Room("a metric of the training server", "train.orchestrator.metrics", "OrchestratorMetrics"),
    Room("rank 0 connects to the orchestrator", "train.link.rank", "ConnectRequest"),
    Room("new weights are loaded into vLLM", "train.endpoints.vllm", "VllmEngine"),
    # The training server: ranks.
    Room("add a loss", "train.runner.passes.losses", "RULES"),
    Room("how log probabilities are computed", "train.runner.passes.logprobs", "GatherLogprobs"),
    Room("the parameters of AdamW", "train.runner.passes.optimizer", "Optimizer"),
    Room("an adapter leaves the device because others are used", "train.runner.model.offload", "Slots"),
    Room(
        "a sequence is admitted when the KV cache has room",
        "train.runner.sampling.continuous_batching",
        "RunningBatch._admit",
    ),
    Room("temperature, top-k and top-p", "train.runner.sampling.sampling_ops", "sample_tokens"),
)


def symbols(tree: ast.Module) -> set[str]:
    """What a module defines at its top level, and the methods of its classes; not what it imports."""
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            methods = (each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {node.name} | {f"{node.name}.{method.name}" for method in methods}
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


@pytest.fixture(scope="module")
def defined() -> dict[str, set[str]]:
    return {module.removeprefix("strata."): symbols(tree) for module, tree in sources()}


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.change)
def test_a_change_has_its_room(room: Room, defined: dict[str, set[str]]) -> None:
    assert room.symbol in defined.get(room.module, set()), f"{room.change}: not in strata.{room.module}"


def test_there_are_enough_rooms_and_none_twice() -> None:
    changes = {room.change for room in ROOMS}
    assert len(changes) == len(ROOMS)
    assert len(changes) >= 40
