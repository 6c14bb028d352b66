"""What a bench prints and how two sides are compared."""

from __future__ import annotations

import io
import json

import pytest

from bench.interleave import Better, Comparison, interleave, turns
from bench.report import Report


def report() -> tuple[Report, io.StringIO, io.StringIO]:
    out, err = io.StringIO(), io.StringIO()
    return Report("journal", out=out, err=err), out, err


def test_a_json_line_has_exactly_the_documented_fields_in_order() -> None:
    printing, out, _ = report()
    printing.add("postgres.append.batch", "facts/s", Comparison([90.0], [100.0]), goal=0.8)
    printing.add("postgres.append.peak", "facts/s", Comparison([300.0], [100.0]), note="only in the table")
    assert [json.loads(line) for line in out.getvalue().splitlines()] == [
        {
            "bench": "journal",
            "case": "postgres.append.batch",
            "unit": "facts/s",
            "ours": 90.0,
            "bare": 100.0,
            "ratio": 0.9,
            "goal": 0.8,
        },
        {
            "bench": "journal",
            "case": "postgres.append.peak",
            "unit": "facts/s",
            "ours": 300.0,
            "bare": 100.0,
            "ratio": 3.0,
            "goal": None,
        },
    ]
    first = json.loads(out.getvalue().splitlines()[0])
    assert list(first) == ["bench", "case", "unit", "ours", "bare", "ratio", "goal"]


def test_a_higher_ratio_is_better_for_a_rate_and_for_a_latency() -> None:
    assert Comparison([200.0], [100.0], "higher").ratio == 2.0
    assert Comparison([2.0], [1.0], "lower").ratio == 0.5


def test_the_ratio_is_the_median_of_the_pairs_and_not_the_ratio_of_the_medians() -> None:
    disturbed = Comparison(ours=[10.0, 100.0, 30.0], bare=[10.0, 50.0, 60.0])
    assert disturbed.ratios == [1.0, 2.0, 0.5]
    assert disturbed.ratio == 1.0
    assert disturbed.spread == (0.75, 1.5)


def test_one_pair_has_no_spread() -> None:
    assert Comparison([3.0], [2.0]).spread == (1.5, 1.5)


def test_the_sides_take_turns_in_the_order_a_b_b_a() -> None:
    assert list(turns(4)) == ["ours", "bare", "bare", "ours", "ours", "bare", "bare", "ours"]


@pytest.mark.parametrize("warm_up", [True, False])
async def test_figures_of_one_round_are_paired_and_the_warm_up_does_not_count(warm_up: bool) -> None:
    asked: list[str] = []

    async def ours() -> float:
        asked.append("ours")
        return float(len(asked))

    async def bare() -> float:
        asked.append("bare")
        return float(len(asked))

    found = await interleave(ours, bare, 2, better="lower", warm_up=warm_up)
    before = 2 if warm_up else 0
    assert asked[before:] == ["ours", "bare", "bare", "ours"]
    assert found == Comparison([before + 1.0, before + 4.0], [before + 2.0, before + 3.0], "lower")


def test_the_table_says_which_goals_are_met_and_which_are_not() -> None:
    printing, out, err = report()
    printing.add("reached", "ms", Comparison([1.0], [1.0], "lower"), goal=0.77)
    printing.add("not.reached", "ms", Comparison([2.0], [1.0], "lower"), goal=0.77)
    printing.add("without.a.goal", "ms", Comparison([9.0], [1.0], "lower"))
    before = out.getvalue()
    printing.table()
    rows = {line.split()[1]: line for line in err.getvalue().splitlines() if line.startswith("│")}
    assert "met" in rows["reached"]
    assert "MISSED" in rows["not.reached"]
    assert "met" not in rows["without.a.goal"]
    assert "goals missed: not.reached" in err.getvalue()
    assert out.getvalue() == before


@pytest.mark.parametrize(
    ("better", "ours", "met"), [("lower", 9.0, True), ("lower", 11.0, False), ("higher", 9.0, False)]
)
def test_a_limit_is_for_our_own_figure_and_stands_in_the_line(better: Better, ours: float, met: bool) -> None:
    printing, out, err = report()
    printing.add("bounded", "ms", Comparison([ours], [1.0], better), limit=10.0)
    printing.table()
    assert json.loads(out.getvalue())["limit"] == 10.0
    assert ("goals missed: bounded" in err.getvalue()) is not met
    assert f"{'≤' if better == 'lower' else '≥'} 10 ms" in err.getvalue()


def test_a_goal_and_a_limit_must_both_be_reached() -> None:
    printing, _, err = report()
    printing.add("fast.but.too.slow", "ms", Comparison([20.0], [40.0], "lower"), goal=1.0, limit=10.0)
    printing.add("both", "ms", Comparison([9.0], [40.0], "lower"), goal=1.0, limit=10.0)
    printing.table()
    assert "goals missed: fast.but.too.slow" in err.getvalue()
    assert "both" not in err.getvalue().splitlines()[-1]


def test_a_quiet_report_prints_json_only() -> None:
    out, err = io.StringIO(), io.StringIO()
    quiet = Report("journal", quiet=True, out=out, err=err)
    quiet.progress("something long")
    quiet.add("case", "ms", Comparison([1.0], [1.0]), goal=2.0)
    quiet.table()
    assert len(out.getvalue().splitlines()) == 1
    assert err.getvalue() == ""
