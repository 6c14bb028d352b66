"""Which tier a test is in, and what a landing runs of the tier merge."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiers.pool import LIMIT_S, Report, make_batches
from tests.tiers.record import forget_removed, promises_of, render, take_durations, take_rows
from tests.tiers.recorder import Outcome
from tests.tiers.table import (
    LIMITS_S,
    PART_S,
    Durations,
    FileTests,
    Ledger,
    LedgerRow,
    Tier,
    choose_slice,
    is_in,
    landings_of_a_cycle,
    select_tier,
    tier_of,
)

SHELL = "tests/shell/x/test_a.py"
E2E = "tests/e2e/test_b.py"
CORE = "tests/core/test_c.py"
FILES = (SHELL, E2E, CORE)


def ids_run(tests: list[FileTests], ids: set[str]) -> list[str]:
    """What pytest would run of these ids."""
    return [
        test_id
        for each in tests
        for test_id in ids
        if test_id.partition("::")[0] == each.path
        and test_id not in each.without
        and (each.only is None or test_id in each.only)
    ]


@given(
    st.dictionaries(
        st.sampled_from([f"{path}::test_{name}[{case}]" for path in FILES for name in "ab" for case in range(4)]),
        st.none() | st.floats(5, 5000),
    )
)
def test_every_test_is_in_one_tier_however_long_tests_take(long: dict[str, float | None]) -> None:
    durations = Durations(long=long)
    ids = {f"{path}::test_{name}[{case}]" for path in FILES for name in "abz" for case in range(4)}
    run = [test_id for tier in Tier for test_id in ids_run(select_tier(tier, FILES, durations), ids)]
    assert sorted(run) == sorted(ids)


@pytest.mark.parametrize(
    ("path", "seconds", "tier"),
    [
        (CORE, 4.0, Tier.UNIT),
        (CORE, 6.0, Tier.PR),
        (SHELL, 6.0, Tier.PR),
        (SHELL, 31.0, Tier.MERGE),
        (SHELL, None, Tier.MERGE),
        (E2E, 6.0, Tier.MERGE),
        (E2E, 901.0, Tier.WEEKLY),
        ("tests/e2e/test_readme.py", 20.0, Tier.PR),
        ("tests/e2e/test_starts.py", 400.0, Tier.PR),
        ("tests/e2e/test_starts.py", None, Tier.PR),
        ("tests/abuse/test_x.py", 119.0, Tier.PR),
        ("tests/abuse/test_x.py", None, Tier.PR),
        ("tests/conformance/journal/test_x.py", 119.0, Tier.PR),
        ("tests/conformance/journal/test_x.py", 121.0, Tier.MERGE),
        ("tests/engines/test_vllm.py", 1.0, Tier.WEEKLY),
        ("tests/cuda_lane/test_cuda_lane.py", 1.0, Tier.WEEKLY),
    ],
)
def test_the_measured_time_moves_a_test_to_a_later_tier(path: str, seconds: float | None, tier: Tier) -> None:
    test_id = f"{path}::test_it"
    assert tier_of(test_id, Durations(long={test_id: seconds})) is tier


def test_a_slice_takes_what_failed_first_then_what_never_ran_and_then_the_oldest() -> None:
    merge = [FileTests(name, 10.0) for name in ("a", "b", "c", "d", "e")]
    ledger = {
        "a": LedgerRow("1", "2026-02-01", "passed"),
        "b": LedgerRow("1", "2026-01-01", "passed"),
        "e": LedgerRow("1", "2026-03-01", "failed"),
    }
    assert [tests.name for tests in choose_slice(merge, ledger, within_s=40.0)] == ["e", "c", "d", "b"]


def test_a_cycle_of_landings_runs_the_whole_tier() -> None:
    merge = [FileTests(f"f{number}", 10.0 + number) for number in range(9)]
    assert landings_of_a_cycle(merge, within_s=40.0) == 4
    with pytest.raises(ValueError, match="fits no slice"):
        landings_of_a_cycle(merge, within_s=15.0)


def test_a_file_that_is_too_long_for_a_slice_is_cut_into_functions_and_cases() -> None:
    long: dict[str, float | None] = {f"{SHELL}::test_m[{case}]": 100.0 for case in range(8)}
    parts = select_tier(Tier.MERGE, [SHELL], Durations(long={**long, f"{SHELL}::test_n": 100.0}))
    assert sorted(part.name for part in parts) == sorted([*long, f"{SHELL}::test_n"])
    assert all(part.seconds <= PART_S for part in parts)


def test_files_of_a_folder_share_a_process_but_for_those_of_weekly() -> None:
    tests = [FileTests(f"tests/engines/test_{name}.py", 5.0) for name in "abc"]
    assert [len(batch.files) for batch in make_batches("pr", tests)] == [3]
    weekly = make_batches("weekly", tests)
    assert [len(batch.files) for batch in weekly] == [1, 1, 1]
    assert all(batch.limit_s > LIMIT_S for batch in weekly)


def report(tier: str, *outcomes: Outcome, parts: tuple[str, ...]) -> Report:
    return Report(tier, "abc", "2026-01-02", list(outcomes), list(parts))


def test_a_run_gives_durations_and_rows() -> None:
    durations, ledger = Durations(long={f"{E2E}::test_x": 40.0, f"{E2E}::test_y": None}), Ledger()
    passed = [Outcome(f"{E2E}::test_x", "passed", 3.0), Outcome(f"{E2E}::test_y", "passed", 77.04)]
    for run in (
        report("slice", *passed, parts=(E2E,)),
        report("pr", Outcome(f"{SHELL}::test_a", "failed", 1.0), parts=(SHELL,)),
    ):
        take_durations(run, durations)
        take_rows(run, ledger)
    assert durations == Durations({E2E: 3.0, SHELL: 0.0}, {f"{E2E}::test_y": 77.0})
    assert ledger == Ledger(
        {"pr": LedgerRow("abc", "2026-01-02", "failed")}, {E2E: LedgerRow("abc", "2026-01-02", "passed")}
    )


def test_a_process_that_died_makes_its_tier_and_its_parts_failed_although_other_tests_passed() -> None:
    ledger = Ledger()
    passed = [Outcome(f"{E2E}::test_x", "passed", 3.0), Outcome(f"{SHELL}::test_a", "passed", 1.0)]
    for tier in ("slice", "pr"):
        take_rows(Report(tier, "abc", "2026-01-02", passed, [SHELL], [E2E]), ledger)
    failed = LedgerRow("abc", "2026-01-02", "failed")
    assert ledger == Ledger({"pr": failed}, {SHELL: LedgerRow("abc", "2026-01-02", "passed"), E2E: failed})


def test_a_report_that_was_written_before_reports_had_incomplete_parts_is_read() -> None:
    written = b'{"tier":"pr","commit":"abc","date":"2026-01-02","outcomes":[],"parts":["a"]}'
    assert msgspec.json.decode(written, type=Report) == report("pr", parts=("a",))


def test_a_test_that_is_gone_is_forgotten_with_the_row_of_its_part_and_a_generated_one_is_not() -> None:
    renamed, generated = f"{E2E}::test_x[old name]", f"{SHELL}::test_route[GET /v1/a]"
    removed = "tests/e2e/test_removed.py"
    row = LedgerRow("abc", "2026-01-01", "passed")
    durations = Durations({removed: 1.0, E2E: 1.0}, {renamed: 700.0, generated: 40.0, f"{removed}::test_x": 9.0})
    ledger = Ledger(parts=dict.fromkeys((renamed, generated, E2E, removed), row))
    take_durations(Report("slice", "abc", "2026-01-02", gone=[renamed]), durations)
    forget_removed(durations, ledger, set(FILES))
    assert durations == Durations({E2E: 1.0}, {generated: 40.0})
    assert ledger == Ledger(parts={generated: row, E2E: row})


def test_what_was_skipped_has_shown_nothing() -> None:
    durations, ledger = Durations(long={f"{E2E}::test_x": 400.0}), Ledger()
    skipped = report("slice", Outcome(f"{E2E}::test_x", "skipped", 0.1), parts=(E2E,))
    take_durations(skipped, durations)
    take_rows(skipped, ledger)
    assert (durations.long, ledger.parts) == ({f"{E2E}::test_x": 400.0}, {})


def test_a_page_of_promises_names_test_tier_and_last_green_commit() -> None:
    path = "tests/core/tiers/test_table.py"
    assert list(promises_of(path)) == []
    register = "tests/sim/test_register.py"
    ledger = Ledger(tiers={"pr": LedgerRow("abc", "2026-01-02", "passed")})
    page = render(promises_of(register), Durations(), ledger)
    (row,) = [line for line in page.splitlines() if "test_no_seed_is_a_violation" in line]
    assert row.startswith("| A replicated register over the journal is linearizable")
    assert row.endswith(f"| `{register}` `test_no_seed_is_a_violation` | pr | `abc` 2026-01-02 |")
    failed = msgspec.structs.replace(ledger, tiers={"pr": LedgerRow("abc", "2026-01-02", "failed")})
    assert "not recorded yet" in render(promises_of(register), Durations(), failed)


def test_a_part_holds_its_own_tests_alone() -> None:
    assert is_in(f"{SHELL}::test_a[1]", SHELL)
    assert is_in(f"{SHELL}::test_a[1]", f"{SHELL}::test_a")
    assert not is_in(f"{SHELL}::test_ab", f"{SHELL}::test_a")


def test_limits_grow_from_tier_to_tier() -> None:
    limits = [LIMITS_S[tier] for tier in (Tier.UNIT, Tier.PR, Tier.MERGE)]
    assert limits == sorted(limits)
