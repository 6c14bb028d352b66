"""What nvidia-smi prints, and which card a job gets."""

from __future__ import annotations

from strata.fleet.agent.gpu import MIB, assign_gpus, parse_gpus
from strata.fleet.agent.preemption import LocalUse, local_use_reason, parse_who
from strata.fleet.core.capability import Gpu
from strata.fleet.core.requirement import Needs

CARDS = tuple(Gpu(name=f"card {n}", vram_bytes=size * 1024**3) for n, size in enumerate((24, 24, 80)))


def test_cards_are_read_from_the_table_and_anything_else_is_not() -> None:
    printed = "NVIDIA GeForce RTX 4090, 24564\nNVIDIA A100-SXM4-80GB, 81920\n"
    assert parse_gpus(printed) == (
        Gpu(name="NVIDIA GeForce RTX 4090", vram_bytes=24564 * MIB),
        Gpu(name="NVIDIA A100-SXM4-80GB", vram_bytes=81920 * MIB),
    )
    assert parse_gpus("No devices were found\n") == ()
    assert parse_gpus("NVIDIA GB10, [N/A]\n") == ()


def test_a_host_with_one_job_at_a_time_shows_it_everything() -> None:
    assert assign_gpus(CARDS, [], Needs(require_cuda=True), slots=1) is None
    assert assign_gpus((), [], Needs(), slots=4) is None


def test_jobs_beside_each_other_get_different_cards() -> None:
    needs = Needs(require_cuda=True)
    first = assign_gpus(CARDS, [], needs, slots=4)
    assert first is not None
    second = assign_gpus(CARDS, [first], needs, slots=4)
    assert second is not None
    assert not set(first) & set(second)


def test_a_job_gets_cards_that_are_large_enough_and_as_many_as_it_needs() -> None:
    assert assign_gpus(CARDS, [], Needs(min_vram_gib=40), slots=2) == (2,)
    assert assign_gpus(CARDS, [(0,)], Needs(min_gpus=2, min_vram_gib=24), slots=2) == (1, 2)


def test_a_job_that_wants_no_card_sees_none_where_others_run_too() -> None:
    assert assign_gpus(CARDS, [], Needs(), slots=2) == ()
    assert assign_gpus(CARDS, [], Needs(prefer_cuda=True), slots=2) == (0,)


def test_the_machine_is_wanted_back_by_strangers_on_a_card_or_people_at_it() -> None:
    assert local_use_reason(LocalUse()) == ""
    assert "4711" in local_use_reason(LocalUse(foreign_pids=(4711,)))
    assert (
        local_use_reason(LocalUse(sessions=parse_who("anna  tty2  2026-11-15 09:00 (tty2)\n")))
        == "anna tty2 is logged in"
    )
