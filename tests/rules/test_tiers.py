"""The committed files of the tiers agree with the tree and with each other."""

from __future__ import annotations

from tests.tiers import table
from tests.tiers.record import PROOF, read_promises, render
from tests.tiers.table import Tier

LONGEST_PR_MINUTES = 35


def test_the_page_of_promises_is_what_the_tests_and_the_ledger_say() -> None:
    promises = read_promises(table.list_files())
    page = render(promises, table.read_durations(), table.read_ledger())
    assert PROOF.read_text(encoding="utf-8") == page, "write it by `make ledger`"


def test_what_the_tiers_name_exists() -> None:
    files = set(table.list_files())
    durations, ledger = table.read_durations(), table.read_ledger()
    assert {*table.PROMOTED, *table.TIMED} <= files
    assert {name.partition("::")[0] for name in (*durations.files, *durations.long, *ledger.parts)} <= files


def test_the_tiers_of_every_landing_fit_into_their_time() -> None:
    files, durations = table.list_files(), table.read_durations()
    tests = [each for tier in (Tier.UNIT, Tier.PR) for each in table.select_tier(tier, files, durations)]
    assert sum(each.seconds for each in tests) / table.WORKERS / 60 <= LONGEST_PR_MINUTES
