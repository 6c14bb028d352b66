"""The state diagrams of docs/coordinator-states.md, found by walking the core: every status it can reach, and how.

`python -m tests.rules.diagrams` writes them. Nothing here says which transitions there are: small jobs are led through
all sequences of a few inputs, and what the core decides and applies is written down. So a diagram shows what the code
does, and a change of the code shows in the diagram.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from strata.base.errors import StrataError
from strata.coord.core.apply import apply
from strata.coord.core.facts import (
    BarrierDecided,
    CheckpointPart,
    Consumed,
    Dataset,
    Fact,
    RegisteredWorker,
    ShardAcked,
    ShardReturned,
    WorkerLost,
)
from strata.coord.core.inputs import (
    Ack,
    ArriveAtBarrier,
    Attached,
    Caller,
    CreateJob,
    Detached,
    Heartbeat,
    Input,
    Leave,
    NextShards,
    Register,
    RegisterDataset,
    ReportCheckpoint,
    RequestRecovery,
    ResetJob,
    Tick,
)
from strata.coord.core.job_config import JobConfig
from strata.coord.core.machine import CoordMachine, decide
from strata.coord.core.state import CoordState, JobState

DOCUMENT: Final = Path(__file__).parents[2] / "docs" / "coordinator-states.md"
BEGIN: Final = "<!-- made by `make diagrams`; do not edit -->"
END: Final = "<!-- end of the diagrams -->"

JOB: Final = "j"
A: Final = Caller(JOB, "a")
B: Final = Caller(JOB, "b")
SOON_S: Final = 0.01
MOST_STATES: Final = 20_000
COUNTED: Final = {
    "members", "evicted", "parted", "fenced", "ranks", "settled", "datasets", "collecting", "checkpoints", "generation",
    "recovered_generation", "recovered_to", "status",
}  # fmt: skip
"""Of a job, what its next moves depend on. The rest remembers, some of it without end."""
LATER_S: Final = 1.5
"""Longer than any patience of the jobs here, and shorter than a pause for which silence is forgiven."""


class Move(NamedTuple):
    after_s: float
    make: Callable[[CoordState], Input]


@dataclasses.dataclass(frozen=True)
class Machine:
    title: str
    text: str
    config: JobConfig
    begin: tuple[Input, ...]
    moves: tuple[Move, ...]
    status: Callable[[CoordState, str], str]
    """Its second argument is the status before, for what the state does not keep."""
    begins_as: str


class Edge(NamedTuple):
    start: str
    given: str
    fact: str
    end: str


def walk(machine: Machine) -> list[Edge]:
    """Every transition there is, in the order in which the shortest way leads to it."""
    state, now_s = CoordState(leader_epoch=1), 1.0
    for given in (CreateJob(JOB, machine.config), *machine.begin):
        now_s += SOON_S
        for fact in _decide(state, given, now_s):
            apply(state, fact)
    nodes = [(state, now_s, machine.begins_as)]
    found: dict[Edge, None] = {}
    seen: set[str] = set()
    while nodes:
        following = []
        for node in nodes:
            for move in machine.moves:
                after = _step(machine, node, move, found)
                if after is not None and (key := _key(*after)) not in seen:
                    seen.add(key)
                    following.append(after)
        nodes = following
        assert len(seen) < MOST_STATES, f"{machine.title}: states without end"
    return list(found)


Node = tuple[CoordState, float, str]
_MACHINE: Final = CoordMachine()


def _decide(state: CoordState, given: Input, now_s: float) -> tuple[Fact, ...]:
    _MACHINE.observe(state, given, now_s)
    outcome = decide(state, given, now_s)
    _MACHINE.observe_outcome(state, given, outcome, now_s)
    return outcome.facts


def _step(machine: Machine, node: Node, move: Move, found: dict[Edge, None]) -> Node | None:
    before, now_s, status = node
    state = dataclasses.replace(
        before, jobs=_MACHINE.load(_MACHINE.save(before)).jobs, soft=copy.deepcopy(before.soft), indexes={}
    )
    now_s += move.after_s
    generation = state.jobs[JOB].generation
    try:
        given = move.make(state)
        facts = _decide(state, given, now_s)
    except (StrataError, LookupError):
        return None  # refused, or there is nothing to do it with
    name = type(given).__name__
    if isinstance(given, RequestRecovery) and given.bad_checkpoint_id:
        name += ": it is bad"
    started = status
    for fact in facts:
        apply(state, fact)
        after = machine.status(state, status)
        if after != status or state.jobs[JOB].generation != generation:
            if machine.title == GENERATION or after != status:
                found.setdefault(Edge(status, name, _words(fact), after))
            generation = state.jobs[JOB].generation
        status = after
    after = machine.status(state, status)
    if after != status or (not facts and after != started):
        found.setdefault(Edge(status, name, "-", after))
    return state, now_s, after


def _key(state: CoordState, now_s: float, status: str) -> str:
    """Equal for two states that go on alike: numbers that only ever grow count from the current one."""
    job, soft = _job(state), state.soft_of(JOB)
    open_ones = [
        (each.barrier_id, [*each.arrived], _roughly(each.deadline_s - now_s)) for each in soft.barriers.values()
    ]
    times = [(name, _roughly(now_s - at_s)) for name, at_s in [*soft.seen_s.items(), *soft.disconnected_at_s.items()]]
    verdicts = {barrier_id: each.verdict for (generation, barrier_id), each in job.verdicts.items() if generation == 1}
    leases: dict[int, int] = {}

    def relative(name: str, value: object) -> object:
        if isinstance(value, dict):
            return {relative("", key): relative(key, each) for key, each in value.items() if key != "acked"}
        if isinstance(value, list | tuple):
            return [relative(name, each) for each in value]
        if name in ("generation", "recovered_generation") and isinstance(value, int):
            return max(-2, value - job.generation)
        if isinstance(value, int) and value >> 32:
            return f"lease {leases.setdefault(value, len(leases))}"
        return value

    kept = {key: each for key, each in msgspec.to_builtins(job).items() if key in COUNTED}
    shape = relative("", kept)
    return repr((shape, min(job.generation, 2), verdicts, times, [*soft.disconnected_at_s], open_ones, status))


def _roughly(seconds: float) -> int:
    """Before, around and after what the jobs here have patience for."""
    return max(-1, min(2, int(seconds // 0.5)))


def _words(fact: Fact) -> str:
    """The name of a fact, and of its fields the one that says what kind it is."""
    kind = type(fact).__name__
    match fact:
        case WorkerLost():
            return f"{kind}: {re.sub(r' for [0-9.]+ s', '', fact.cause)}"
        case BarrierDecided():
            return f"{kind}: {fact.verdict.name}"
        case ShardReturned():
            return f"{kind}: {'failed too often' if fact.quarantined else 'failed' if fact.failed else 'not begun'}"
        case ShardAcked():
            return f"{kind}: to the end"
        case _:
            return kind


def _job(state: CoordState) -> JobState:
    return state.jobs[JOB]


def _register(worker_id: str, life: int) -> Input:
    return Register(JOB, RegisteredWorker(worker_id=worker_id, incarnation=f"{worker_id}-{life}"))


def always(given: Input, after_s: float = SOON_S) -> Move:
    return Move(after_s, lambda state: given)


def ticks() -> tuple[Move, ...]:
    return always(Tick()), always(Tick(), LATER_S)


# A worker, as the coordinator sees it


def _worker_status(state: CoordState, before: str) -> str:
    job = _job(state)
    if "a" in job.evicted:
        return "gone"
    if "a" not in job.members:
        return "unknown"
    if "a" in state.soft_of(JOB).disconnected_at_s:
        return "suspect"
    return "member" if "a" in job.ranks and job.settled else "waiting"


QUICK: Final = JobConfig(
    heartbeat_interval_s=0.3, missed_beats=3, settle_s=0, barrier_timeout_s=1.0, keep_checkpoints=1
)
SLOW: Final = msgspec.structs.replace(QUICK, heartbeat_interval_s=60)

WORKER: Final = Machine(
    title="A worker",
    text="What a worker says that it does (INITIALIZING to ERROR) is its own word, in any order. Only ERROR has an"
    " effect: it is the Beat that loses the worker.",
    config=QUICK,
    begin=(),
    moves=(
        always(_register("a", 1)),
        always(_register("a", 2)),
        always(Attached(A)),
        always(Detached(A)),
        always(Heartbeat(A, failed=True)),
        always(Leave(A)),
        *ticks(),
    ),
    status=_worker_status,
    begins_as="unknown",
)


# A shard of one epoch


def _shard_status(state: CoordState, before: str) -> str:
    dataset = _job(state).datasets["d"]
    ledger = dataset.epochs.get(0)
    if ledger is None:
        return "put aside" if 0 in dataset.quarantined else "consumed" if 0 in dataset.finished else "waiting"
    if ledger.quarantined:
        return "put aside"
    if ledger.leases:
        return "leased"
    return "given back" if ledger.returned else "consumed" if ledger.issued else "waiting"


def _next(*acks: Callable[[int], Ack]) -> Move:
    """Ask for a shard; with an ack, of the one that is held."""

    def make(state: CoordState) -> Input:
        ledger = _job(state).datasets["d"].epoch(0)
        held = tuple(ledger.leases)
        given = tuple(ack(held[0]) for ack in acks)
        return NextShards(A, "d", 0, acks=given, held=held)

    return Move(SOON_S, make)


def _report(caller: Caller, checkpoint_id: str, step: int) -> Move:
    def make(state: CoordState) -> Input:
        job = _job(state)
        part = CheckpointPart(job.ranks[caller.worker_id], f"{checkpoint_id}/{caller.worker_id}", 1, "")
        leases = [
            lease
            for dataset in job.datasets.values()
            for each in dataset.epochs.values()
            for lease in each.leases.values()
        ]
        consumed = tuple(Consumed("d", 0, lease.lease_id, lease.until) for lease in leases)
        return ReportCheckpoint(caller, checkpoint_id, step, part, consumed)

    return Move(SOON_S, make)


def _recover(bad: str | None = None) -> Move:
    return Move(SOON_S, lambda state: RequestRecovery(A, _job(state).generation, bad))


SHARD: Final = Machine(
    title="A shard of one epoch",
    text="A lease ends with the ack of its last sample. Its worker's loss gives back what is not consumed; a recovery"
    " does, and takes back what was consumed after the checkpoint.",
    config=msgspec.structs.replace(SLOW, max_shard_failures=2),
    begin=(
        _register("a", 1),
        Tick(),
        RegisterDataset(A, Dataset(dataset_id="d", samples=2, shard_size=2, buckets=1)),
    ),
    moves=(
        _next(),
        _next(Ack),
        _next(lambda lease: Ack(lease, failed=True, reason="x")),
        _report(A, "c", 1),
        _recover(),
        always(Leave(A)),
        always(_register("a", 2)),
        always(Tick()),
    ),
    status=_shard_status,
    begins_as="waiting",
)


# A barrier of one generation


def _barrier_status(state: CoordState, before: str) -> str:
    decided = _job(state).verdicts.get((1, "x"))
    if decided is not None:
        return decided.verdict.name
    return "open" if _job(state).generation == 1 and "x" in state.soft_of(JOB).barriers else "not there"


BARRIER: Final = Machine(
    title="A barrier of one generation",
    text="A verdict is final: whoever asks again gets the same.",
    config=SLOW,
    begin=(_register("a", 1), _register("b", 1), Tick()),
    moves=(
        always(ArriveAtBarrier(A, "x")),
        always(ArriveAtBarrier(B, "x")),
        always(Leave(B)),
        _recover(),
        *ticks(),
    ),
    status=_barrier_status,
    begins_as="not there",
)


# A checkpoint


def _checkpoint_status(state: CoordState, before: str) -> str:
    job = _job(state)
    if "c1" in job.collecting:
        return "collecting"
    if job.checkpoint("c1") is not None:
        return "committed"
    if any(uri.startswith("c1/") for uri in job.tombstones):
        return "to be deleted"
    return before if before in ("not there", "given up") else "given up"


CHECKPOINT: Final = Machine(
    title="A checkpoint",
    text="Shown for a job that keeps one. Parts that are to be deleted are listed for the workers, who delete them.",
    config=SLOW,
    begin=(_register("a", 1), _register("b", 1), Tick()),
    moves=(
        _report(A, "c1", 1),
        _report(B, "c1", 1),
        _report(A, "c2", 2),
        _report(B, "c2", 2),
        always(Leave(B)),
        _recover(),
        _recover("c1"),
        always(Tick()),
    ),
    status=_checkpoint_status,
    begins_as="not there",
)


# The generation of a job

GENERATION: Final = "The generation of a job"


def _generation_status(state: CoordState, before: str) -> str:
    job = _job(state)
    if job.generation == 0:
        return "none yet"
    return "current" if job.settled else "over"


GENERATIONS: Final = Machine(
    title=GENERATION,
    text="While it is over, calls that need one are refused for a moment. Each GenerationFormed counts it up by one.",
    config=msgspec.structs.replace(SLOW, min_workers=2),
    begin=(),
    moves=(
        always(_register("a", 1)),
        always(_register("b", 1)),
        always(_register("c", 1)),
        always(Leave(B)),
        _recover(),
        always(Tick()),
    ),
    status=_generation_status,
    begins_as="none yet",
)

# A job


def _job_status(state: CoordState, before: str) -> str:
    job = _job(state)
    recovers = job.members["a"].recover_first if "a" in job.members else False
    return f"{job.status.value}, a recovers first" if recovers else job.status.value


JOBS: Final = Machine(
    title="A job",
    text="Its one worker is a, and its data one shard. Leave is that of a worker whose program is done."
    " DeleteJob is possible where ResetJob is.",
    config=QUICK,
    begin=(),
    moves=(
        always(_register("a", 1)),
        always(_register("a", 2)),
        always(RegisterDataset(A, Dataset(dataset_id="d", samples=2, shard_size=2, buckets=1))),
        _next(),
        _next(Ack),
        _recover(),
        always(Leave(A, finished=True)),
        always(Detached(A)),
        always(ResetJob(JOB)),
        *ticks(),
    ),
    status=_job_status,
    begins_as="created",
)

MACHINES: Final = (JOBS, WORKER, GENERATIONS, SHARD, BARRIER, CHECKPOINT)


def drawn(machines: Iterable[Machine] = MACHINES) -> str:
    """The part of the document."""
    parts = [BEGIN]
    for machine in machines:
        parts += [f"**{machine.title}.** {machine.text}", "```text\n" + _table(walk(machine)) + "\n```"]
    return "\n\n".join([*parts, END])


def _table(edges: list[Edge]) -> str:
    order = {name: at for at, name in enumerate(dict.fromkeys(edge.start for edge in edges))}
    in_order = sorted(edges, key=lambda edge: (order[edge.start], order.get(edge.end, len(order)), edge.given))
    rows = [("from", "input", "fact", "to"), *in_order]
    widths = [max(len(row[at]) for row in rows) for at in range(4)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def replaced(document: str, part: str) -> str:
    """The document with another part between the two marks."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the document lacks {BEGIN if not begin else END}")
    return before + part + after


def main() -> None:
    document = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(replaced(document, drawn()), encoding="utf-8")


if __name__ == "__main__":
    main()
