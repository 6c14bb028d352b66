"""Runs tiers of tests, and writes down what runs have shown.

python -m tests.tiers run pr            one tier, whole; `slice` is the part of `merge` that a landing runs
python -m tests.tiers run tests/core    all tests of folders or files, of whatever tier
python -m tests.tiers show              how long each tier takes, and how many landings a cycle of `merge` has
python -m tests.tiers record            take the last runs into durations.json, ledger.json and docs/proof.md
"""

from __future__ import annotations

import argparse
import datetime
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Final

import msgspec

from tests.programs import find_missing, needs_of
from tests.support.postgres import PostgresServer
from tests.tiers import table
from tests.tiers.pool import Batch, BatchResult, Pool, Report, judge, make_batches
from tests.tiers.recorder import Outcome
from tests.tiers.table import SLICE, FileTests, Tier

RUNS: Final = table.ROOT / ".tests"
PATHS: Final = "paths"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tiers", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run tiers, folders or files")
    run.add_argument("what", nargs="+", help="check, unit, pr, merge, weekly, slice, or paths")
    run.add_argument("--workers", type=int, default=table.WORKERS)
    run.add_argument("--shuffle", type=int, help="run the tests in a random order of this seed")
    run.add_argument("--slice-within", type=float, default=inf, metavar="S", help="begin no part of the slice later")
    run.add_argument("--pytest", default="", help="more arguments for pytest; such a run is not recorded")
    run.add_argument("--runs", type=Path, default=RUNS, help="the folder for what the run writes")
    commands.add_parser("show", help="say how long the tiers take")
    commands.add_parser("record", help="write down the last runs")
    options = parser.parse_args()
    if options.command == "show":
        return show()
    if options.command == "record":
        from tests.tiers.record import record

        return record(RUNS)
    return run_tests(options)


def select(what: Sequence[str]) -> dict[str, list[FileTests]]:
    """The tests of each tier that was named, and those below all paths together."""
    tiers = [name for name in what if name in {*(tier.value for tier in Tier), SLICE}]
    paths = [name for name in what if name not in tiers]
    return {name: select_named(name) for name in tiers} | ({PATHS: select_below(paths)} if paths else {})


def select_named(name: str) -> list[FileTests]:
    files, durations = table.list_files(), table.read_durations()
    if name == SLICE:
        merge = table.select_tier(Tier.MERGE, files, durations)
        return table.choose_slice(merge, table.read_ledger().parts, within_s=slice_s())
    return table.select_tier(Tier(name), files, durations)


def select_below(paths: Sequence[str]) -> list[FileTests]:
    durations = table.read_durations()
    files = table.list_files()
    for path in paths:
        if not any(Path(file).is_relative_to(path) for file in files):
            raise SystemExit(f"there are no tests below {path}")
    chosen = [file for file in files if any(Path(file).is_relative_to(path) for path in paths)]
    return [
        FileTests(
            path,
            durations.files.get(path, table.UNMEASURED_S),
            named=frozenset(test_id for test_id in durations.long if table.is_in(test_id, path)),
        )
        for path in chosen
    ]


def slice_s() -> float:
    """Seconds of one process that a slice has."""
    return table.SLICE_S * table.WORKERS


def run_tests(options: argparse.Namespace) -> int:
    chosen, left_out, line = leave_out(select(options.what))
    if left_out:
        print(f"NOT RUN {line}", flush=True)
    started_s = time.monotonic()
    batches = [batch for name, tests in chosen.items() for batch in make_batches(name, tests)]
    timed = [batch for batch in batches if batch.files[0].path in table.TIMED]
    with PostgresServer() as postgres:
        arguments = shlex.split(options.pytest)
        pool = Pool(
            options.runs,
            postgres.server_url,
            arguments=arguments,
            shuffle=options.shuffle,
            slice_within_s=options.slice_within,
        )
        results = pool.run([batch for batch in batches if batch not in timed], workers=options.workers)
        results += pool.run(timed, workers=1)
        outcomes, good = judge(pool, results)
    if arguments:
        print("this run is not recorded: arguments for pytest can leave out tests")
    else:
        for name in chosen:
            write_report(options.runs, name, results, outcomes, left_out)
    collection_s = sum(result.collection_s for _, result in results)
    print(f"imports and collection in {len(results)} processes: {collection_s:.0f} s of processor time")
    files = sum(map(len, chosen.values()))
    print(f"{', '.join(chosen)}: {files} files in {time.monotonic() - started_s:.0f} s")
    if SLICE in chosen:
        show_cycle()
    counts = Counter(outcome.result for outcome in outcomes)
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped", flush=True)
    return int(not good or not outcomes or bool(left_out))


def leave_out(chosen: dict[str, list[FileTests]]) -> tuple[dict[str, list[FileTests]], dict[str, list[str]], str]:
    """What can run here, by tier the names of what lacks a program of the system, and a line that says so."""
    paths = {tests.path for each in chosen.values() for tests in each}
    files, line = find_missing({path: needs_of(table.ROOT / path) for path in paths})
    left_out = {name: [tests.name for tests in each if tests.path in files] for name, each in chosen.items()}
    can_run = {name: [tests for tests in each if tests.path not in files] for name, each in chosen.items()}
    return can_run, {name: names for name, names in left_out.items() if names}, line


def write_report(
    runs: Path,
    name: str,
    results: Sequence[tuple[Batch, BatchResult]],
    outcomes: Sequence[Outcome],
    left_out: Mapping[str, Sequence[str]],
) -> None:
    """What the pool showed of one tier, for `record`."""
    own = [(batch, result) for batch, result in results if batch.tier == name]
    report = make_report(name, own, outcomes, left_out.get(name, ()))
    (runs / f"{name}.json").write_bytes(msgspec.json.encode(report))
    counts = Counter(outcome.result for outcome in report.outcomes)
    seconds = sum(result.seconds for _, result in own)
    print(f"{name}: {len(report.parts)} files, {counts['passed']} tests passed, {seconds:.0f} s of workers")


def make_report(
    name: str, own: Sequence[tuple[Batch, BatchResult]], outcomes: Sequence[Outcome], left_out: Sequence[str] = ()
) -> Report:
    ids = {outcome.test_id for _, result in own for outcome in result.outcomes}
    return Report(
        name,
        tested_commit(),
        datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        [outcome for outcome in outcomes if outcome.test_id in ids],
        sorted(tests.name for batch, result in own if not result.missing for tests in batch.files),
        sorted([*left_out, *(tests.name for batch, result in own if result.missing for tests in batch.files)]),
        sorted({test_id for _, result in own for test_id in result.gone}),
    )


def tested_commit() -> str:
    """The commit, with a plus where files have changed since."""
    commit = git("rev-parse", "--short=10", "HEAD")
    return commit + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


def git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=table.ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def show() -> int:
    files, durations = table.list_files(), table.read_durations()
    for tier in Tier:
        tests = table.select_tier(tier, files, durations)
        minutes = sum(each.seconds for each in tests) / table.WORKERS / 60
        print(f"{tier.value:7} {len(tests):4} files, {minutes:6.1f} minutes with {table.WORKERS} workers")
    show_cycle()
    return 0


def show_cycle() -> None:
    merge = table.select_tier(Tier.MERGE, table.list_files(), table.read_durations())
    landings = table.landings_of_a_cycle(merge, within_s=slice_s())
    passed = {name for name, row in table.read_ledger().parts.items() if row.result == "passed"}
    fresh = sum(each.name in passed for each in merge)
    print(f"merge is whole within {landings} landings; the ledger has {fresh} of its {len(merge)} parts as passed")


if __name__ == "__main__":
    sys.exit(main())
