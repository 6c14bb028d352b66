"""The sequential specification, and the search of one partition for an order that respects it and real time.

The search is Wing and Gong's, with Lowe's memory of configurations. Four reductions keep it small, and each one only
skips configurations whose every continuation is also a continuation of one that is kept:
  * a history is split by `SequentialModel.partition`, and each part is checked alone (`linearizable.check` does that);
  * an operation that never changes the state is placed as soon as its answer fits;
  * unknown operations with equal inputs are used in order of invocation, since they are interchangeable;
  * of two configurations that differ only in unknown operations used, the one that used fewer is enough.

How a result is explained to a person is not known here.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, Protocol, TypeVar

from tests.support.history import In, Operation, Out, Outcome, Returned, Unknown, began, ended

State = TypeVar("State", bound=Hashable)
In_contra = TypeVar("In_contra", contravariant=True)
Out_contra = TypeVar("Out_contra", contravariant=True)


class SequentialModel(Protocol[State, In_contra, Out_contra]):
    """A sequential specification.

    `step` is given what the client saw and returns every state that may follow; none means "impossible here".
    A deterministic model returns at most one state, a nondeterministic one ("claims any ready job") with several,
    and for `Unknown` it covers all outputs at once. Had `step` enumerated (output, state) pairs instead, a claim
    among 10,000 jobs would build 10,000 states to keep the one that matches; had it returned one state, neither
    choice nor an unknown claim could be expressed. `outcome.allows(output)` covers both outcomes in one line.
    """

    def initial(self) -> State: ...

    def step(self, state: State, input: In_contra, outcome: Outcome[Out_contra]) -> Iterable[State]: ...

    def partition(self, input: In_contra) -> Hashable:
        """Operations in different partitions share no state, so that each partition is checked alone."""
        return None

    def is_read(self, input: In_contra, outcome: Outcome[Out_contra]) -> bool:
        """True promises that this operation with this outcome changes no state whatever; False is always safe."""
        return False


class SearchResult(Enum):
    ORDER = "order"
    NOTHING = "nothing"
    LIMIT = "limit"


# A run of unknown operations with nothing returned in between is tried only after this many alternatives deeper in
# the history per operation of the run: an unknown operation explains an answer rarely, a run of them very rarely.
_RUN_COST = 12


@dataclass(slots=True, eq=False)
class Node(Generic[State, In, Out]):
    """A configuration: returned operations below `base` and those in `mask` (relative to it) are placed.

    `used` counts the unknown operations placed, one bit field for each distinct input.
    """

    base: int
    mask: int
    state: State
    used: int
    run: int
    parent: Node[State, In, Out] | None
    added: list[Operation[In, Out]]
    depth: int = field(init=False)

    def __post_init__(self) -> None:
        self.depth = self.base + self.mask.bit_count()

    def order(self) -> tuple[Operation[In, Out], ...]:
        chunks: list[list[Operation[In, Out]]] = []
        node: Node[State, In, Out] | None = self
        while node is not None:
            chunks.append(node.added)
            node = node.parent
        return tuple(operation for chunk in reversed(chunks) for operation in chunk)


class Search(Generic[State, In, Out]):
    """The search of one partition. `best` holds the deepest nodes so far, and after ORDER the complete one."""

    def __init__(self, part: Sequence[Operation[In, Out]], model: SequentialModel[State, In, Out], limit: int) -> None:
        self.model = model
        self.limit = limit
        self.steps = 0
        self.returned = sorted((each for each in part if isinstance(each.outcome, Returned)), key=ended)
        self._ends = [ended(each) for each in self.returned]
        self._next = _windows(self.returned)
        self._is_read = [model.is_read(each.input, each.outcome) for each in self.returned]
        self._unknown = _by_input(
            each for each in part if isinstance(each.outcome, Unknown) and not model.is_read(each.input, each.outcome)
        )
        # One bit more than a count needs: the guard bit that makes "each field at most" one subtraction.
        self._width = max((len(same).bit_length() for same in self._unknown), default=0) + 1
        self._guards = sum(1 << (self._width * (k + 1) - 1) for k in range(len(self._unknown)))
        self._seen: dict[tuple[int, int, State], list[int]] = {}
        self._queue: list[tuple[int, int, bool, Node[State, In, Out]]] = []
        self._pushed = 0
        self.best: list[Node[State, In, Out]] = []
        self._furthest = 0

    def run(self) -> SearchResult:
        root = self.model.initial()
        self._admit(Node(0, 0, root, 0, 0, None, []), 0, root, 0, [])
        while self._queue:
            if self.best[0].base == len(self.returned):
                return SearchResult.ORDER
            if self.steps >= self.limit:
                return SearchResult.LIMIT
            _, _, with_unknown, node = heapq.heappop(self._queue)
            if with_unknown:
                self._expand_unknown(node)
            else:
                self._expand_returned(node)
                if self._unknown:
                    self._push(node, node.run + 1, with_unknown=True)
        return SearchResult.NOTHING

    def furthest(self) -> Operation[In, Out]:
        """The returned operation that no order found so far gets past."""
        return self.returned[self._furthest]

    def candidates(self, node: Node[State, In, Out]) -> list[Operation[In, Out]]:
        return [self.returned[i] for i in self._next[node.base] if not node.mask >> (i - node.base) & 1]

    def _expand_returned(self, node: Node[State, In, Out]) -> None:
        # The queue is last in, first out among equals: reversed, the operation that returned first is tried first.
        for i in reversed(self._next[node.base]):
            bit = 1 << (i - node.base)
            if node.mask & bit or self._is_read[i]:
                continue  # a read that fits was placed when the node was admitted
            operation = self.returned[i]
            self.steps += 1
            for state in self.model.step(node.state, operation.input, operation.outcome):
                self._admit(node, node.mask | bit, state, node.used, [operation])

    def _expand_unknown(self, node: Node[State, In, Out]) -> None:
        deadline = self._ends[node.base]
        field_mask = (1 << self._width) - 1
        for k, same in enumerate(self._unknown):
            if began(same[0]) > deadline:
                break  # sorted by first invocation: the rest was invoked too late as well
            count = node.used >> (self._width * k) & field_mask
            if count == len(same) or began(same[count]) > deadline:
                continue
            operation = same[count]
            used = node.used + (1 << (self._width * k))
            self.steps += 1
            for state in self.model.step(node.state, operation.input, operation.outcome):
                self._admit(node, node.mask, state, used, [operation])

    def _admit(
        self, parent: Node[State, In, Out], mask: int, state: State, used: int, added: list[Operation[In, Out]]
    ) -> None:
        base, mask = self._place_reads(parent.base, mask, state, added)
        seen = self._seen.setdefault((base, mask, state), [])
        guarded = used | self._guards
        for fewer in seen:
            if (guarded - fewer) & self._guards == self._guards:
                return
        seen.append(used)
        run = parent.run + 1 if used != parent.used else 0
        node = Node(base, mask, state, used, run, parent, added)
        self._furthest = max(self._furthest, base)
        if not self.best or node.depth > self.best[0].depth:
            self.best = [node]
        elif node.depth == self.best[0].depth:
            self.best.append(node)
        self._push(node, run, with_unknown=False)

    def _place_reads(self, base: int, mask: int, state: State, added: list[Operation[In, Out]]) -> tuple[int, int]:
        """Place every read that fits this state; each one placed may let later ones begin."""
        is_read, step = self._is_read, self.model.step
        while base < len(self.returned):
            for i in self._next[base]:
                bit = 1 << (i - base)
                if is_read[i] and not mask & bit:
                    operation = self.returned[i]
                    self.steps += 1
                    if any(True for _ in step(state, operation.input, operation.outcome)):
                        mask |= bit
                        added.append(operation)
            done = (~mask & (mask + 1)).bit_length() - 1
            if not done:
                break
            base, mask = base + done, mask >> done
        return base, mask

    def _push(self, node: Node[State, In, Out], run: int, *, with_unknown: bool) -> None:
        self._pushed += 1
        heapq.heappush(self._queue, (_RUN_COST * run - node.depth, -self._pushed, with_unknown, node))


def _windows(returned: Sequence[Operation[In, Out]]) -> list[list[int]]:
    """For each operation, in order of return: itself and those open at that moment, which may all come next."""
    ends = [ended(each) for each in returned]
    begun = sorted(range(len(returned)), key=lambda i: began(returned[i]))
    windows: list[list[int]] = []
    window: list[int] = []
    taken = 0
    for base, end in enumerate(ends):
        start = taken
        while taken < len(begun) and began(returned[begun[taken]]) < end:
            taken += 1
        window = sorted([i for i in window if i >= base] + begun[start:taken])
        windows.append(window)
    return windows


def _by_input(unknown: Iterable[Operation[In, Out]]) -> list[list[Operation[In, Out]]]:
    """Groups of interchangeable operations, each in order of invocation; an unhashable input is a group of its own."""
    groups: dict[Hashable, list[Operation[In, Out]]] = {}
    for number, operation in enumerate(sorted(unknown, key=began)):
        try:
            groups.setdefault((type(operation.input), operation.input), []).append(operation)
        except TypeError:
            groups[number] = [operation]
    return list(groups.values())
