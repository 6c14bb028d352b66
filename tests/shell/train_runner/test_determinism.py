"""`ranks.deterministic`: what a rank sets before it meets the others, and what is exempt from it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils import deterministic

from strata.base.settings import process_environment
from strata.train.runner.determinism import VARIABLES, any_kernels
from strata.train.runner.settings import runner_settings
from strata.train.settings import load_settings

JOIN = """
import json, os, sys
from pathlib import Path
import torch
from torch.utils import deterministic
from strata.train.runner.collectives import join_process_group
from strata.train.runner.settings import runner_settings
from strata.train.settings import load_settings
join_process_group(runner_settings(load_settings(Path(sys.argv[1]), environ={})), Path(sys.argv[2]))
try:
    torch.zeros(2).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
    refused = False
except RuntimeError:
    refused = True
print(json.dumps({
    "refused": refused,
    "warns": torch.is_deterministic_algorithms_warn_only_enabled(),
    "fills": torch.are_deterministic_algorithms_enabled() and deterministic.fill_uninitialized_memory,
    "variables": {name: os.environ.get(name) for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NCCL_NVLS_ENABLE")},
}))
"""
RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "strata-single-node"}


def joined(folder: Path, *, deterministic: bool) -> dict[str, object]:
    """What a rank with this setting has after it joined its group."""
    settings = folder / "server.toml"
    settings.write_text(
        f'[server]\ndata = "{folder}/d"\n[model]\npath = "m"\n'
        f'[ranks]\nbackend = "gloo"\ndeterministic = {str(deterministic).lower()}\n'
    )
    environment = {name: value for name, value in process_environment().items() if name not in VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", JOIN, str(settings), str(folder / "rendezvous")],
        env=environment | RANK,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


@pytest.mark.timeout(120)
def test_a_rank_asks_torch_cublas_and_nccl_for_the_same_bits_before_it_meets_the_others(tmp_path: Path) -> None:
    assert joined(tmp_path, deterministic=True) == {
        "refused": True,
        # With warnings torch's flash attention stays with sums in any order.
        "warns": False,
        "fills": False,
        "variables": dict(VARIABLES),
    }


@pytest.mark.timeout(120)
def test_without_the_setting_a_rank_sets_nothing(tmp_path: Path) -> None:
    found = joined(tmp_path, deterministic=False)
    assert found["refused"] is False
    assert found["variables"] == dict.fromkeys(VARIABLES)


def test_the_setting_is_off_unless_set(tmp_path: Path) -> None:
    (tmp_path / "server.toml").write_text(f'[server]\ndata = "{tmp_path}/d"\n[model]\npath = "m"\n')
    assert not runner_settings(load_settings(tmp_path / "server.toml", environ={})).deterministic


@pytest.fixture
def strict() -> Iterator[None]:
    before = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(mode=True)
    yield
    torch.use_deterministic_algorithms(mode=False)
    deterministic.fill_uninitialized_memory = before  # type: ignore[attr-defined]


@pytest.mark.usefixtures("strict")
def test_sampling_may_use_any_kernel_and_what_comes_after_it_may_not() -> None:
    def fail() -> None:
        with any_kernels():
            assert not torch.are_deterministic_algorithms_enabled()
            raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011 - raised above
        fail()
    assert torch.are_deterministic_algorithms_enabled()


def test_where_any_kernel_may_run_sampling_changes_nothing() -> None:
    with any_kernels():
        assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
