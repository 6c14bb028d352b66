"""What nvidia-smi prints, and how a job is shown its cards."""

from __future__ import annotations

from strata.fleet.agent.gpu import MIB, parse_gpus, visible_devices
from strata.fleet.agent.preemption import LocalUse, local_use_reason, parse_who
from strata.fleet.core.capability import Gpu


def test_cards_are_read_from_the_table_and_anything_else_is_not() -> None:
    printed = "NVIDIA GeForce RTX 4090, 24564\nNVIDIA A100-SXM4-80GB, 81920\n"
    assert parse_gpus(printed) == (
        Gpu(name="NVIDIA GeForce RTX 4090", vram_bytes=24564 * MIB),
        Gpu(name="NVIDIA A100-SXM4-80GB", vram_bytes=81920 * MIB),
    )
    assert parse_gpus("No devices were found\n") == ()
    assert parse_gpus("NVIDIA GB10, [N/A]\n") == ()


def test_a_job_sees_just_its_cards_by_the_variable_of_their_maker() -> None:
    nvidia, amd = "GPU-8f2c1d3e-0000-4b4b-9c9c-0123456789ab", "GPU-00a1b2c3d4e5f607"
    assert visible_devices([nvidia, 2]) == {"CUDA_VISIBLE_DEVICES": f"{nvidia},2"}
    assert visible_devices([amd]) == {"ROCR_VISIBLE_DEVICES": amd}
    assert visible_devices([]) == {"CUDA_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": ""}


def test_the_machine_is_wanted_back_by_strangers_on_a_card_or_people_at_it() -> None:
    assert local_use_reason(LocalUse()) == ""
    assert "4711" in local_use_reason(LocalUse(foreign_pids=(4711,)))
    assert (
        local_use_reason(LocalUse(sessions=parse_who("anna  tty2  2026-11-15 09:00 (tty2)\n")))
        == "anna tty2 is logged in"
    )
