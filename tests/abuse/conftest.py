"""The attack suite: every test is one attack with a name, and the counts are printed at the end.

`@pytest.mark.attack(area, attempt)` names it. A test passes when the attack is held off. Two other outcomes exist:
`by_design=(document, sentence)` for what the documents allow in that very sentence, and `known_open="M9"` for a hole
that is not closed yet: such a test asserts the defence, is expected to fail, and fails the run once the defence exists.
A test that sends many variants counts them with the fixture `tries`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from tests.programs import require_programs

ROOT: Final = Path(__file__).parents[2]
HERE: Final = Path(__file__).parent
PROPERTY: Final = "attack"


def _mark_of(item: pytest.Item) -> pytest.Mark | None:
    return item.get_closest_marker("attack")


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    for item in items:
        if HERE not in item.path.parents:
            continue
        mark = _mark_of(item)
        if mark is None or len(mark.args) != 2:
            raise pytest.UsageError(f"{item.nodeid} has no @pytest.mark.attack(area, attempt)")
        hole = mark.kwargs.get("known_open")
        if hole:
            item.add_marker(pytest.mark.xfail(reason=f"known and open: {hole}", strict=True))


def pytest_collection_finish(session: pytest.Session) -> None:
    require_programs(session.items)


@pytest.fixture(autouse=True)
def _recorded_attack(request: pytest.FixtureRequest) -> None:
    mark = _mark_of(request.node)
    assert mark is not None
    if "by_design" in mark.kwargs:
        document, sentence = mark.kwargs["by_design"]
        text = " ".join((ROOT / document).read_text(encoding="utf-8").split())
        assert " ".join(sentence.split()) in text, f"{document} does not say: {sentence}"


@pytest.fixture
def tries(request: pytest.FixtureRequest) -> Callable[[int], None]:
    """Call it with the number of requests, files or messages that were tried; a test without it counts one."""
    properties = request.node.user_properties

    def count(more: int) -> None:
        # At once: the report of the call is made before a fixture ends.
        total = dict(properties).get("tries", 0) + more
        properties[:] = [*(each for each in properties if each[0] != "tries"), ("tries", total)]

    return count


def pytest_runtest_setup(item: pytest.Item) -> None:
    mark = _mark_of(item)
    if mark is not None:
        kind = (
            "known and open" if "known_open" in mark.kwargs else "by design" if "by_design" in mark.kwargs else "held"
        )
        item.user_properties.append((PROPERTY, json.dumps([*mark.args, kind])))


def count_attacks(reporter: Any) -> tuple[dict[str, dict[str, int]], int]:
    """By area, how many attacks ended how. An attack that was tried on many routes is one, and broken if one try is."""
    kinds: dict[tuple[str, str], str] = {}
    tries = 0
    for outcome in ("passed", "xfailed", "failed", "error"):  # The last one wins.
        for report in reporter.stats.get(outcome, []):
            properties = dict(getattr(report, "user_properties", []))
            if PROPERTY not in properties or (outcome == "passed" and report.when != "call"):
                continue
            area, attempt, kind = json.loads(properties[PROPERTY])
            kinds[area, attempt] = "BROKEN" if outcome in ("failed", "error") else kind
            tries += sum(more for key, more in report.user_properties if key == "tries") or 1
    areas: dict[str, dict[str, int]] = {}
    for (area, _), kind in kinds.items():
        row = areas.setdefault(area, {})
        row[kind] = row.get(kind, 0) + 1
    return areas, tries


def pytest_terminal_summary(terminalreporter: Any) -> None:
    areas, tries = count_attacks(terminalreporter)
    if not areas:
        return
    terminalreporter.section("attacks")
    totals: dict[str, int] = {}
    for area, row in sorted(areas.items()):
        terminalreporter.write_line(f"{area:<40} " + ", ".join(f"{count} {key}" for key, count in sorted(row.items())))
        for key, count in row.items():
            totals[key] = totals.get(key, 0) + count
    summary = ", ".join(f"{count} {key}" for key, count in sorted(totals.items()))
    terminalreporter.write_line(f"{sum(totals.values())} attacks ({tries} tries): {summary}")
