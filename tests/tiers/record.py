"""Takes what runs have shown into the committed files: durations, ledger, and docs/proof.md.

`.ci/run` only reads these files. The page of promises is generated from the marker `proves` of the tests, with the tier
of each test and the commit at which that tier, or the test's file, was last green.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Set
from pathlib import Path
from typing import Final

import msgspec

from tests.tiers import table
from tests.tiers.pool import Report
from tests.tiers.table import Durations, Ledger, LedgerRow, Tier

PROOF: Final = table.ROOT / "docs" / "proof.md"
SLICES: Final = (table.SLICE, Tier.MERGE.value, Tier.WEEKLY.value)
"""Runs that have a row for each part."""
_HEAD: Final = """# Proof

Each promise has a test. `python -m tests.tiers record` generates this page from the marker `proves` of the tests.

The *tier* says how often a test runs: `check`, `unit` and `pr` run whole in every `.ci/run`, `merge` in slices that
are whole within a cycle of landings, `weekly` by `make weekly`. *Last green* is the last recorded commit at which it
passed. Longer series of faults have [a page of their own](campaigns.md).
"""


class Promise(msgspec.Struct, frozen=True):
    """A sentence of the documents and the test that shows it."""

    text: str
    path: str
    test: str
    """A function, or nothing for all tests of the file."""


def record(runs: Path) -> int:
    reports = [msgspec.json.decode(path.read_bytes(), type=Report) for path in sorted(runs.glob("*.json"))]
    durations, ledger = table.read_durations(), table.read_ledger()
    for report in sorted(reports, key=lambda report: report.date):
        take_durations(report, durations)
        take_rows(report, ledger)
    forget_removed(durations, ledger, set(table.list_files()))
    write(table.DURATIONS, durations)
    write(table.LEDGER, ledger)
    PROOF.write_text(render(read_promises(table.list_files()), durations, ledger), encoding="utf-8")
    print(f"{len(reports)} runs are recorded")
    return 0


def write(path: Path, content: Durations | Ledger) -> None:
    ordered = msgspec.json.encode(content, order="sorted")
    path.write_bytes(msgspec.json.format(ordered, indent=1) + b"\n")


def take_durations(report: Report, durations: Durations) -> None:
    for test_id in report.gone:
        durations.long.pop(test_id, None)
    short_s: dict[str, float] = {}
    for outcome in report.outcomes:
        if outcome.result != "passed":
            # One that is skipped or fails at once does not show how long it takes.
            continue
        path = outcome.test_id.partition("::")[0]
        durations.long.pop(outcome.test_id, None)
        if outcome.seconds >= table.LONG_S:
            durations.long[outcome.test_id] = round(outcome.seconds, 1)
        else:
            short_s[path] = short_s.get(path, 0.0) + outcome.seconds
    for name in report.parts:
        if "::" not in name and (name in short_s or table.base_tier(name).value == report.tier):
            durations.files[name] = round(short_s.get(name, 0.0), 1)


def take_rows(report: Report, ledger: Ledger) -> None:
    def add(rows: dict[str, LedgerRow], name: str, results: set[str]) -> None:
        """A part that ran nothing, or skipped all, has shown nothing. A row never takes the place of a newer one."""
        newest = rows.get(name)
        if results & {"passed", "failed"} and (newest is None or newest.date <= report.date):
            rows[name] = LedgerRow(report.commit, report.date, "failed" if "failed" in results else "passed")

    if report.tier in SLICES:
        for name in report.parts:
            ended = (outcome for outcome in report.outcomes if table.is_in(outcome.test_id, name))
            add(ledger.parts, name, {outcome.result for outcome in ended})
        for name in report.incomplete:
            add(ledger.parts, name, {"failed"})
    elif report.tier in {tier.value for tier in Tier}:
        missing = {"failed"} if report.incomplete else set()
        add(ledger.tiers, report.tier, {outcome.result for outcome in report.outcomes} | missing)


def forget_removed(durations: Durations, ledger: Ledger, files: Set[str]) -> None:
    """Forgets files that are gone, and rows of parts without a long test: only for such tests is a file cut."""
    for names in (durations.files, durations.long, ledger.parts):
        for name in [name for name in names if name.partition("::")[0] not in files]:
            del names[name]
    for name in [name for name in ledger.parts if "::" in name]:
        if not any(table.is_in(test_id, name) for test_id in durations.long):
            del ledger.parts[name]


def read_promises(files: Iterable[str]) -> list[Promise]:
    return [promise for path in files for promise in promises_of(path)]


def promises_of(path: str) -> Iterator[Promise]:
    """What the marker `proves` of a file's tests says, by the source: nothing is imported."""
    tree = ast.parse((table.ROOT / path).read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for text in _texts(node.decorator_list):
                yield Promise(text, path, node.name)
        elif isinstance(node, ast.Assign) and any(
            isinstance(n, ast.Name) and n.id == "pytestmark" for n in node.targets
        ):
            marks = node.value.elts if isinstance(node.value, ast.List) else [node.value]
            for text in _texts(marks):
                yield Promise(text, path, "")


def _texts(marks: Iterable[ast.expr]) -> Iterator[str]:
    for mark in marks:
        if isinstance(mark, ast.Call) and isinstance(mark.func, ast.Attribute) and mark.func.attr == "proves":
            yield ast.literal_eval(mark.args[0])


def render(promises: Iterable[Promise], durations: Durations, ledger: Ledger) -> str:
    by_text: dict[str, list[Promise]] = {}
    for promise in sorted(promises, key=lambda one: (one.text.startswith("Never"), one.path, one.test)):
        by_text.setdefault(promise.text, []).append(promise)
    lines = [_HEAD, "| promise | test | tier | last green |", "|---|---|---|---|"]
    for text, shown_by in by_text.items():
        cells = [cells_of(promise, durations, ledger) for promise in shown_by]
        columns = ("<br>".join(dict.fromkeys(column)) for column in zip(*cells, strict=True))
        lines.append(f"| {text.replace('|', '/')} | {' | '.join(columns)} |")
    return "\n".join(lines) + "\n"


def cells_of(promise: Promise, durations: Durations, ledger: Ledger) -> tuple[str, str, str]:
    test_id = f"{promise.path}::{promise.test}" if promise.test else promise.path
    long = [known for known in durations.long if table.is_in(known, test_id)]
    tiers = {table.tier_of(known, durations) for known in long} or {table.base_tier(promise.path)}
    tier = max(tiers, key=list(Tier).index)
    if tier in {Tier.MERGE, Tier.WEEKLY}:
        rows = [row for name, row in ledger.parts.items() if table.is_in(test_id, name) or table.is_in(name, test_id)]
        row = min(rows, key=lambda row: (row.result == "passed", row.date), default=None)
    else:
        row = ledger.tiers.get(tier.value)
    green = f"`{row.commit}` {row.date}" if row is not None and row.result == "passed" else "not recorded yet"
    return f"`{promise.path}`" + (f" `{promise.test}`" if promise.test else ""), tier.value, green
