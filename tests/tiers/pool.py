"""One pool of pytest processes for the tests of a tier. Each process collects its own files and no others.

The longest files start first. A test that failed is run once more, alone, at the end: what passes then is FLAKY, which
a run may have in at most three files. What a process was to run and did not is a failure, whatever its exit status.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from math import inf
from pathlib import Path
from typing import Final

import msgspec

from tests.tiers.recorder import Collected, Outcome, Selection
from tests.tiers.table import ROOT, SLICE, TIMED, FileTests, Tier

BATCH_S: Final = 40.0
"""Short files of one folder share a process up to this."""
LIMIT_S: Final = 2400.0
"""A process that takes longer is ended; single tests have limits of their own (pytest-timeout)."""
WEEKLY_LIMIT_S: Final = 5 * 3600.0
"""So long may a file of `weekly` take: engines are installed and models loaded."""
MOST_RERUN: Final = 20
MOST_FLAKY_FILES: Final = 3
"""Tests of one file share what they set up: one cause can fail all of them."""


class Batch(msgspec.Struct, frozen=True):
    """The files of one process, all of one tier."""

    tier: str
    files: tuple[FileTests, ...]

    @property
    def seconds(self) -> float:
        return sum(tests.seconds for tests in self.files)

    @property
    def name(self) -> str:
        first = self.files[0]
        return first.name if len(self.files) == 1 else f"{Path(first.path).parent} ({len(self.files)} files)"

    @property
    def limit_s(self) -> float:
        return WEEKLY_LIMIT_S if self.tier == Tier.WEEKLY.value else LIMIT_S


class BatchResult(msgspec.Struct):
    """What one process did."""

    outcomes: list[Outcome]
    missing: list[str]
    """Tests that were collected and not run, or the files of a process that collected nothing."""
    gone: list[str]
    """Tests that the durations name and no file has."""
    output: str
    seconds: float
    collection_s: float
    """Processor time of imports and collection."""

    @property
    def is_good(self) -> bool:
        return not self.missing and all(outcome.result != "failed" for outcome in self.outcomes)


class Report(msgspec.Struct):
    """What a run of the pool showed. The file that it is written to is read by `python -m tests.tiers record`."""

    tier: str
    commit: str
    date: str
    outcomes: list[Outcome] = []
    parts: list[str] = []
    """The files, or parts of files, whose tests of this tier were all run."""
    incomplete: list[str] = []
    """Those of which a test was not run, or whose process ended with an error."""
    gone: list[str] = []


def make_batches(tier: str, tests: Iterable[FileTests]) -> list[Batch]:
    batches: list[list[FileTests]] = []
    open_batch: dict[str, list[FileTests]] = {}
    for each in sorted(tests, key=lambda one: one.name):
        folder = str(Path(each.path).parent)
        batch = open_batch.get(folder)
        alone = each.path in TIMED or "::" in each.name or tier == Tier.WEEKLY.value
        if alone or batch is None or sum(one.seconds for one in batch) + each.seconds > BATCH_S:
            batch = []
            batches.append(batch)
            if not alone:
                open_batch[folder] = batch
        batch.append(each)
    return [Batch(tier, tuple(batch)) for batch in batches]


class Pool:
    """Runs batches with a number of workers, and keeps what they print below a folder.

    The parts of a slice begin last, and none of them later than `slice_within_s` from now: what there is no time for is
    for the next landing. All else is run, however long it takes.
    """

    def __init__(
        self,
        folder: Path,
        postgres_url: str,
        *,
        arguments: Sequence[str] = (),
        shuffle: int | None = None,
        slice_within_s: float = inf,
    ) -> None:
        self._slice_until_s = time.monotonic() + slice_within_s
        self._folder = folder
        self._postgres_url = postgres_url
        self._arguments = list(arguments)
        self._shuffle = shuffle
        self._numbers = itertools.count(1)
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, batches: Sequence[Batch], *, workers: int) -> list[tuple[Batch, BatchResult]]:
        done: list[tuple[Batch, BatchResult]] = []
        with ThreadPoolExecutor(max_workers=workers) as threads:
            longest_first = sorted(batches, key=lambda batch: (batch.tier == SLICE, -batch.seconds))
            started = {threads.submit(self._run_batch, batch): batch for batch in longest_first}
            for future in as_completed(started):
                batch, result = started[future], future.result()
                if result is None:
                    print(f"{batch.name}: no time is left, the next landing runs it", flush=True)
                    continue
                done.append((batch, result))
                counts = Counter(outcome.result for outcome in result.outcomes)
                told = ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "no test"
                print(
                    f"[{len(done):3}/{len(batches)}] {result.seconds:6.1f} s  {batch.tier:5} {batch.name}: {told}",
                    flush=True,
                )
                if not result.is_good:
                    print(result.output, flush=True)
        return done

    def _run_batch(self, batch: Batch) -> BatchResult | None:
        if batch.tier == SLICE and time.monotonic() > self._slice_until_s:
            return None
        only = {tests.path: sorted(tests.only) for tests in batch.files if tests.only is not None}
        without = sorted(test_id for tests in batch.files for test_id in tests.without)
        named = set[str]().union(*(tests.named | tests.without | (tests.only or set()) for tests in batch.files))
        selection = Selection(only, without, sorted(named), self._shuffle)
        return self._run_pytest([tests.path for tests in batch.files], selection, batch.limit_s)

    def _run_pytest(self, paths: Sequence[str], selection: Selection, limit_s: float) -> BatchResult:
        name = self._folder / f"{next(self._numbers):03}"
        wanted, record, printed = (name.with_suffix(suffix) for suffix in (".selection", ".jsonl", ".log"))
        wanted.write_bytes(msgspec.json.encode(selection))
        record.unlink(missing_ok=True)
        options = ["-p", "tests.tiers.recorder", "--selection", wanted, "--record", record, "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", "-q", *map(str, options), *self._arguments, *paths]
        environment = {**os.environ, "STRATA_TEST_POSTGRES": self._postgres_url}  # noqa: TID251
        started_s = time.monotonic()
        with printed.open("wb") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
            try:
                status = process.wait(timeout=limit_s)
            except subprocess.TimeoutExpired:
                process.kill()
                status = process.wait()
                log.write(f"\nended after {limit_s:.0f} s\n".encode())
        output = printed.read_text(encoding="utf-8", errors="replace")
        outcomes, missing, gone, collection_s = read_record(record, paths)
        # 1 without a failed test: an error after the last one, as in a thread. 5: nothing was selected, which is right
        # for a file that has all its tests in another tier.
        failed = any(outcome.result == "failed" for outcome in outcomes)
        if not missing and status not in ({0, 1, 5} if failed else {0, 5}):
            missing = [f"{paths[0]} (status {status})"]
        return BatchResult(outcomes, missing, gone, output, time.monotonic() - started_s, collection_s)

    def passes_alone(self, test_id: str, *, limit_s: float) -> bool:
        selection = Selection({test_id.partition("::")[0]: [test_id]})
        result = self._run_pytest([test_id.partition("::")[0]], selection, limit_s)
        if not result.is_good:
            print(result.output, flush=True)
        return result.is_good and [outcome.result for outcome in result.outcomes] == ["passed"]


def read_record(record: Path, paths: Sequence[str]) -> tuple[list[Outcome], list[str], list[str], float]:
    """What has ended, what was collected and has not, what no file has, and the processor time of the collection."""
    lines = record.read_bytes().splitlines() if record.exists() else []
    if not lines:
        return [], [f"{path} (nothing was collected)" for path in paths], [], 0.0
    collected = msgspec.json.decode(lines[0], type=Collected)
    outcomes = [msgspec.json.decode(line, type=Outcome) for line in lines[1:]]
    left = Counter(collected.test_ids) - Counter(outcome.test_id for outcome in outcomes)
    return outcomes, sorted(left), collected.gone, collected.processor_s


def judge(pool: Pool, results: Sequence[tuple[Batch, BatchResult]]) -> tuple[list[Outcome], bool]:
    """All outcomes, and whether the run is green. What failed and passed alone counts as passed, if it may be flaky."""
    outcomes = [outcome for _, result in results for outcome in result.outcomes]
    missing = [test_id for _, result in results for test_id in result.missing]
    failed = {
        outcome.test_id: batch.limit_s
        for batch, result in results
        for outcome in result.outcomes
        if outcome.result == "failed"
    }
    for test_id in sorted({test_id for _, result in results for test_id in result.gone}):
        print(f"GONE {test_id}: its file has no such test; `make ledger` forgets how long it took")
    for test_id in missing:
        print(f"NOT RUN {test_id}")
    if len(failed) > MOST_RERUN:
        print(f"{len(failed)} tests failed: too many to be flaky, none is run again")
        print("\n".join(f"FAILED {test_id}" for test_id in failed))
        return outcomes, False
    flaky = {test_id for test_id, limit_s in failed.items() if pool.passes_alone(test_id, limit_s=limit_s)}
    for test_id in failed:
        print(f"{'FLAKY ' if test_id in flaky else 'FAILED'} {test_id}")
    flaky_files = {test_id.partition("::")[0] for test_id in flaky}
    if len(flaky_files) > MOST_FLAKY_FILES:
        print(f"flaky tests in {len(flaky_files)} files, at most {MOST_FLAKY_FILES} are tolerated")
        return outcomes, False
    good = not missing and len(flaky) == len(failed)
    return [
        msgspec.structs.replace(outcome, result="passed") if outcome.test_id in flaky else outcome
        for outcome in outcomes
    ], good
