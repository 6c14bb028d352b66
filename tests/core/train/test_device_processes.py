"""What ranks and engines are started with on CUDA devices, and what is refused before they are."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, Final

import pytest

from strata.base.errors import Code, StrataError
from strata.train.core.sampling import MAX_TOP_K
from strata.train.launch.engine_supervisor import engine_command
from strata.train.launch.launcher import rank_command
from strata.train.launch.preflight import check_features, check_memory
from strata.train.launch.supervised_process import ProcessCommand
from strata.train.plan.defaults import ResolvedSettings
from strata.train.plan.device_placement import DevicePlacement
from strata.train.plan.devices import Hardware
from strata.train.plan.model_files import ModelFiles
from tests.core.train.machines import llama_8b, machine, resolve, settings

VLLM: Final[dict[str, Any]] = {"inference_engine": "vllm"}


def rank_environment(found: ResolvedSettings, **environment: str) -> dict[str, str]:
    return dict(rank_command(found, Path("server.toml"), environment).environment)


def engine(found: ResolvedSettings, name: str = "engine-0", **environment: str) -> tuple[list[str], dict[str, str]]:
    command = engine_command(found.settings, name, environment, "key", found.placement)
    return list(command.arguments), dict(command.environment)


def test_ranks_on_devices_get_their_devices_their_settings_and_what_torch_reads() -> None:
    found = resolve(machine(4, 24), **VLLM)
    environment = rank_environment(found, PATH="/bin", CUDA_VISIBLE_DEVICES="0,1,2,3")
    expected = {
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "0,1,2",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": "/data/logs/collectives/rank_",
        "OMP_NUM_THREADS": "1",
        "STRATA_RANKS_BACKEND": "nccl",
        "STRATA_RANKS_NPROC": "3",
        "STRATA_MODEL_DTYPE": "bfloat16",
        "STRATA_RANKS_COLLECTIVE_TIMEOUT_S": "120.0",
    }
    assert {name: environment.get(name) for name in expected} == expected


def test_ranks_on_cpus_get_nothing_of_that() -> None:
    for found in (resolve(Hardware()), resolve(machine(2, 24), ranks_backend="gloo")):
        environment = rank_environment(found)
        assert not {name for name in environment if name.startswith(("CUDA", "TORCH_", "PYTORCH_ALLOC"))}
        assert (environment["STRATA_MODEL_DTYPE"], environment["OMP_NUM_THREADS"]) == ("float32", "1")


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_an_allocator_that_the_environment_configures_stays_as_it_is(name: str) -> None:
    environment = rank_environment(resolve(machine(1, 24)), **{name: "max_split_size_mb:64"})
    assert {each: text for each, text in environment.items() if "ALLOC_CONF" in each} == {name: "max_split_size_mb:64"}


def test_engines_see_their_own_devices_and_compute_in_the_type_of_the_ranks() -> None:
    found = resolve(machine(4, 24), inference_count=2, **VLLM)
    ranks = set(rank_environment(found)["CUDA_VISIBLE_DEVICES"].split(","))
    shown = {}
    for name in ("engine-0", "engine-1"):
        arguments, environment = engine(found, name, CUDA_VISIBLE_DEVICES="0,1,2,3", STRATA_MODEL_DTYPE="float32")
        assert arguments[arguments.index("--dtype") + 1] == "bfloat16"
        assert not [each for each in environment if each.startswith("STRATA_")]
        shown[name] = environment["CUDA_VISIBLE_DEVICES"]
    assert shown == {"engine-0": "2", "engine-1": "3"}
    assert not ranks & set(shown.values())


@pytest.mark.parametrize(
    ("written", "sizes"),
    [
        ({"inference_devices_per_engine": 2}, ["2"]),
        ({"inference_devices": ("0,1,2",)}, ["3"]),
        ({"inference_arguments": ("--tensor-parallel-size", "2")}, ["2"]),
        ({"inference_devices_per_engine": 2, "inference_arguments": ("-pp=2",)}, []),
        ({}, []),
    ],
)
def test_an_engine_splits_its_layers_over_its_devices_unless_its_arguments_say_how(
    written: dict[str, Any], sizes: list[str]
) -> None:
    arguments, _ = engine(resolve(machine(8, 80), **VLLM, **written))
    places = [at for at, argument in enumerate(arguments) if argument == "--tensor-parallel-size"]
    assert [arguments[at + 1] for at in places] == sizes


def test_without_devices_an_engine_has_the_environment_of_the_launcher() -> None:
    _, environment = engine(resolve(Hardware(), **VLLM), CUDA_VISIBLE_DEVICES="MIG-1")
    assert environment["CUDA_VISIBLE_DEVICES"] == "MIG-1"
    assert "CUDA_DEVICE_ORDER" not in environment


# Memory


def in_folder(folder: Path, files: ModelFiles) -> str:
    """A model that is nothing but the header of its weights."""
    header = {name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]} for name, shape in files.shapes.items()}
    encoded = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(encoded)) + encoded)
    (folder / "config.json").write_text(json.dumps(files.config))
    return str(folder)


def test_a_model_that_fits_on_ranks_and_engines_passes(tmp_path: Path) -> None:
    path = in_folder(tmp_path, llama_8b())
    for on, written in (
        (machine(1, 24), {}),
        (machine(8, 80), {**VLLM, "inference_count": 4}),
        (machine(4, 24), VLLM),
        (
            machine(1, 80),
            {**VLLM, "inference_share_devices": "memory", "inference_arguments": ("--gpu-memory-utilization", "0.5")},
        ),
        (machine(1, 24), {**VLLM, "inference_share_devices": "turns"}),
    ):
        check_memory(resolve(on, model_path=path, **written))


@pytest.mark.parametrize(
    ("on", "written", "says", "hint"),
    [
        (machine(1, 24), {"model_training": "full"}, "needs 13", "use bfloat16, more devices"),
        (machine(1, 24), {"model_dtype": "float32"}, "needs 3", "use bfloat16, more devices"),
        (
            machine(2, 16),
            VLLM,
            "engine-0 needs 16.1 GB for weights on each of its devices, and takes 14.4 GB of device 1",
            "inference.devices_per_engine",
        ),
        (
            machine(2, 80, free=60),
            VLLM,
            "engines are to take 90% of device 1, which is 72 GB, and 60 GB are free",
            "--gpu-memory-utilization",
        ),
        (
            machine(1, 80),
            {**VLLM, "inference_count": 2, "inference_share_devices": "memory"},
            "engines are to take 180% of device 0",
            "--gpu-memory-utilization",
        ),
        (
            machine(1, 80),
            {**VLLM, "inference_count": 2, "inference_share_devices": "turns"},
            "engines are to take 180% of device 0",
            "--gpu-memory-utilization",
        ),
        (
            machine(1, 80),
            {**VLLM, "inference_share_devices": "memory"},
            "there are 8 GB, beside what the engines take of the same devices",
            "--gpu-memory-utilization",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_what_to_do(
    tmp_path: Path, on: Hardware, written: dict[str, Any], says: str, hint: str
) -> None:
    found = resolve(on, model_path=in_folder(tmp_path, llama_8b()), **written)
    with pytest.raises(StrataError) as refused:
        check_memory(found)
    assert refused.value.code is Code.INVALID
    assert says in refused.value.message
    assert hint in (refused.value.hint or "")


def test_an_engine_that_takes_turns_is_started_so_that_it_can_sleep() -> None:
    def command(**written: Any) -> ProcessCommand:
        return engine_command(settings(**VLLM, **written), "engine-0", {}, "key", DevicePlacement())

    turns = command(inference_share_devices="turns")
    assert "--enable-sleep-mode" in turns.arguments
    assert turns.environment["VLLM_SERVER_DEV_MODE"] == "1"
    others = command()
    assert "--enable-sleep-mode" not in others.arguments
    assert "VLLM_SERVER_DEV_MODE" not in others.environment


def test_an_engine_reports_the_log_probabilities_that_the_ranks_report() -> None:
    arguments = list(engine_command(settings(**VLLM), "engine-0", {}, "key", DevicePlacement()).arguments)
    assert arguments[arguments.index("--logprobs-mode") + 1] == "processed_logprobs"
    assert int(arguments[arguments.index("--max-logprobs") + 1]) == MAX_TOP_K


def test_ranks_of_an_operator_take_no_turns() -> None:
    """Nothing would hold back their start."""
    with pytest.raises(StrataError, match=r'ranks\.mode "connect"'):
        check_features(settings(**VLLM, inference_share_devices="turns", ranks_mode="connect"))
