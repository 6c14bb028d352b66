"""The checker against an independent one on small random histories, and against the clock on long ones."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from tests.support.history import Handle, History, Operation, Returned, Unknown
from tests.support.linearizable import Linearizable, Violation, check
from tests.support.register_model import Add, CompareAndSet, Read, RegisterInput, RegisterModel, Value, Write

RegisterOperation = Operation[RegisterInput, Value]


def take_effect(registers: dict[str, int], input: RegisterInput) -> Value:
    """A plain register machine that shares no code with the model."""
    value = registers.get(input.key, 0)
    match input:
        case Read():
            return value
        case Write(value=new):
            assert isinstance(new, int)
            registers[input.key] = new
            return None
        case Add(n=n):
            registers[input.key] = value + n
            return value + n
        case CompareAndSet(old=old, new=new):
            assert isinstance(new, int)
            if value == old:
                registers[input.key] = new
            return value == old


def explains(order: Sequence[RegisterOperation]) -> bool:
    registers: dict[str, int] = {}
    for operation in order:
        output = take_effect(registers, operation.input)
        if isinstance(operation.outcome, Returned) and operation.outcome.output != output:
            return False
    return True


def respects_real_time(order: Sequence[RegisterOperation]) -> bool:
    return not any(
        late.returned_at is not None and late.returned_at < early.invoked_at
        for early, late in itertools.combinations(order, 2)
    )


def brute_force(history: Sequence[RegisterOperation]) -> bool:
    known = [each for each in history if isinstance(each.outcome, Returned)]
    unknown = [each for each in history if isinstance(each.outcome, Unknown)]
    return any(
        explains(order) and respects_real_time(order)
        for size in range(len(unknown) + 1)
        for chosen in itertools.combinations(unknown, size)
        for order in itertools.permutations(known + list(chosen))
    )


def small_history(rng: random.Random) -> list[RegisterOperation]:
    """Up to six operations on one or two keys at few distinct times, with answers that are about half right."""
    keys = "x" if rng.random() < 0.7 else "xy"
    history: list[RegisterOperation] = []
    for client in range(rng.randint(1, 6)):
        key = rng.choice(keys)
        small = rng.randrange(3)
        kind = rng.randrange(4)
        start = rng.randrange(8)
        outcome: Returned[Value] | Unknown
        input: RegisterInput
        if kind == 0:
            input, outcome = Read(key), Returned(rng.randrange(3))
        elif kind == 1:
            input, outcome = Write(key, small), Returned(None)
        elif kind == 2:
            input, outcome = Add(key, 1), Returned(rng.randint(1, 3))
        else:
            input, outcome = CompareAndSet(key, rng.randrange(2), small), Returned(rng.random() < 0.5)
        if rng.random() < 0.3:
            outcome = Unknown()
        end = None if isinstance(outcome, Unknown) else start + rng.randrange(6)
        history.append(Operation(client, input, start, end, outcome))
    return history


@pytest.mark.parametrize("seed", range(4))
def test_the_verdict_is_that_of_trying_every_order(seed: int) -> None:
    rng = random.Random(seed)
    verdicts: Counter[type] = Counter()
    with_unknown: Counter[type] = Counter()
    for _ in range(800):
        history = small_history(rng)
        verdict = check(history, RegisterModel())
        verdicts[type(verdict)] += 1
        if any(isinstance(each.outcome, Unknown) for each in history):
            with_unknown[type(verdict)] += 1
        assert isinstance(verdict, Linearizable) == brute_force(history), history
        if isinstance(verdict, Linearizable):
            for order in verdict.orders.values():
                assert explains(order), order
                assert respects_real_time(order), order
        else:
            assert isinstance(verdict, Violation)
            assert not brute_force(verdict.operations), verdict
            assert verdict.culprit in verdict.operations
            assert verdict.unplaced
            assert str(verdict.culprit) in verdict.explain()
    assert min(verdicts[Linearizable], verdicts[Violation]) > 210, verdicts
    assert min(with_unknown[Linearizable], with_unknown[Violation]) > 105, with_unknown


@dataclass
class InFlight:
    handle: Handle[Value]
    input: RegisterInput
    reply_lost: bool
    effective: bool = False
    output: Value = None


def run_clients(rng: random.Random, *, operations: int, clients: int, keys: int) -> tuple[RegisterOperation, ...]:
    """A linearizable execution: invocation, effect and reply are separate moments, in random interleaving.

    A tenth of the replies is lost; of those operations a half took effect before, a quarter does so much later.
    """
    history: History[RegisterInput, Value] = History()
    registers: dict[str, int] = {}
    busy: dict[int, InFlight] = {}
    stray: list[RegisterInput] = []
    started = 0
    for now in itertools.count():
        if started == operations and not busy:
            break
        if stray and rng.random() < 0.05:
            take_effect(registers, stray.pop(rng.randrange(len(stray))))
        client = rng.randrange(clients)
        if client not in busy:
            if started < operations:
                started += 1
                input = any_input(rng, f"k{rng.randrange(keys)}", registers)
                busy[client] = InFlight(history.invoke(client, input, now), input, rng.random() < 0.1)
            continue
        call = busy[client]
        if call.effective or (call.reply_lost and rng.random() < 0.5):
            del busy[client]
            if not call.reply_lost:
                call.handle.returned(call.output, now)
                continue
            call.handle.unknown()
            if not call.effective and rng.random() < 0.5:
                stray.append(call.input)
        else:
            call.output, call.effective = take_effect(registers, call.input), True
    return history.operations()


def any_input(rng: random.Random, key: str, registers: dict[str, int]) -> RegisterInput:
    expected = registers.get(key, 0) if rng.random() < 0.7 else rng.randrange(20)
    choices: list[RegisterInput] = [
        Read(key),
        Write(key, rng.randrange(20)),
        Add(key, rng.randint(1, 3)),
        CompareAndSet(key, expected, rng.randrange(20)),
    ]
    return rng.choice(choices)


@pytest.mark.parametrize("keys", [1, 4, 32])
def test_two_thousand_operations_of_eight_clients_are_accepted_within_a_second(keys: int) -> None:
    history = run_clients(random.Random(keys), operations=2_000, clients=8, keys=keys)
    assert sum(isinstance(each.outcome, Unknown) for each in history) > 150
    started = time.process_time()
    verdict = check(history, RegisterModel())
    assert time.process_time() - started < 1
    assert isinstance(verdict, Linearizable)
    assert all(explains(order) for order in verdict.orders.values())


@pytest.mark.parametrize("seed", range(6))
def test_one_flipped_answer_among_two_thousand_is_rejected_by_name(seed: int) -> None:
    rng = random.Random(seed)
    history = list(run_clients(rng, operations=2_000, clients=8, keys=16))
    reads = [n for n, each in enumerate(history) if isinstance(each.input, Read) and each.returned_at is not None]
    flipped = rng.choice(reads)
    history[flipped] = replace(history[flipped], outcome=Returned(1_000_000))
    verdict = check(history, RegisterModel())
    assert isinstance(verdict, Violation)
    assert verdict.culprit == history[flipped]
    assert str(history[flipped]) in verdict.explain()
    assert len(verdict.operations) <= 3, verdict.explain()


@pytest.mark.parametrize("seed", range(10))
def test_one_compare_and_set_that_lied_is_rejected_or_explained_by_unknown_operations(seed: int) -> None:
    rng = random.Random(seed)
    history = list(run_clients(rng, operations=300, clients=4, keys=8))
    answers = [
        n for n, each in enumerate(history) if isinstance(each.outcome, Returned) and each.outcome.output is True
    ]
    flipped = rng.choice(answers)
    history[flipped] = replace(history[flipped], outcome=Returned(False))
    verdict = check(history, RegisterModel())
    if isinstance(verdict, Violation):
        assert verdict.partition == history[flipped].input.key
    else:
        assert isinstance(verdict, Linearizable)
        assert all(explains(order) for order in verdict.orders.values())


def test_the_verdict_and_its_words_do_not_depend_on_the_order_of_the_list() -> None:
    rng = random.Random(5)
    history = list(run_clients(rng, operations=400, clients=8, keys=2))
    broken = next(n for n, each in enumerate(history) if n > 200 and each.outcome == Returned(True))
    history[broken] = replace(history[broken], outcome=Returned(False))
    shuffled = rng.sample(history, len(history))
    first, again, other = (check(each, RegisterModel()) for each in (history, history, shuffled))
    assert isinstance(first, Violation)
    assert first == again == other
    assert first.explain() == other.explain()
