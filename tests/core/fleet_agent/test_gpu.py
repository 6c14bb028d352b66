"""What nvidia-smi prints, and which card a job gets."""

from __future__ import annotations

from strata.fleet.agent.gpu import MIB, choose, parse_cards
from strata.fleet.agent.person import Use, parse_who, wanted_back
from strata.fleet.core.capability import Gpu
from strata.fleet.core.requirement import Needs

CARDS = tuple(Gpu(name=f"card {n}", vram_bytes=size * 1024**3) for n, size in enumerate((24, 24, 80)))


def test_cards_are_read_from_the_table_and_anything_else_is_not() -> None:
    printed = "NVIDIA GeForce RTX 4090, 24564\nNVIDIA A100-SXM4-80GB, 81920\n"
    assert parse_cards(printed) == (
        Gpu(name="NVIDIA GeForce RTX 4090", vram_bytes=24564 * MIB),
        Gpu(name="NVIDIA A100-SXM4-80GB", vram_bytes=81920 * MIB),
    )
    assert parse_cards("No devices were found\n") == ()
    assert parse_cards("NVIDIA GB10, [N/A]\n") == ()


def test_a_host_with_one_job_at_a_time_shows_it_everything() -> None:
    assert choose(CARDS, [], Needs(require_cuda=True), slots=1) is None
    assert choose((), [], Needs(), slots=4) is None


def test_jobs_beside_each_other_get_different_cards() -> None:
    needs = Needs(require_cuda=True)
    first = choose(CARDS, [], needs, slots=4)
    assert first is not None
    second = choose(CARDS, [first], needs, slots=4)
    assert second is not None
    assert not set(first) & set(second)


def test_a_job_gets_cards_that_are_large_enough_and_as_many_as_it_needs() -> None:
    assert choose(CARDS, [], Needs(min_vram_gib=40), slots=2) == (2,)
    assert choose(CARDS, [(0,)], Needs(min_gpus=2, min_vram_gib=24), slots=2) == (1, 2)


def test_a_job_that_wants_no_card_sees_none_where_others_run_too() -> None:
    assert choose(CARDS, [], Needs(), slots=2) == ()
    assert choose(CARDS, [], Needs(prefer_cuda=True), slots=2) == (0,)


def test_the_machine_is_wanted_back_by_strangers_on_a_card_or_people_at_it() -> None:
    assert wanted_back(Use()) == ""
    assert "4711" in wanted_back(Use(strangers=(4711,)))
    assert wanted_back(Use(sessions=parse_who("anna  tty2  2026-11-15 09:00 (tty2)\n"))) == "anna tty2 is logged in"
