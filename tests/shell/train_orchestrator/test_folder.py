"""The data folder is its owner's alone, and one launcher's at a time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from strata.base.errors import Code, StrataError
from strata.base.private import require_private_folder
from strata.train.launch.launcher import lock_folder, run_launcher
from strata.train.plan.defaults import ResolvedSettings, resolve_settings
from strata.train.plan.devices import Hardware
from strata.train.settings import load_settings


def configured(folder: Path) -> tuple[ResolvedSettings, Path]:
    file = folder / "server.toml"
    file.write_text(f'[server]\ndata = "{folder}/d"\n[model]\npath = "{folder}/m"\n', encoding="utf-8")
    return resolve_settings(load_settings(file, environ={}), Hardware(), None), file


def refusal(folder: Path) -> StrataError:
    with pytest.raises(StrataError) as refused:
        run_launcher(*configured(folder), lambda _: None)
    return refused.value


def test_a_second_launcher_on_one_data_folder_is_refused_in_one_line(tmp_path: Path) -> None:
    require_private_folder(tmp_path / "d", "files")
    with lock_folder(tmp_path / "d"):
        refused = refusal(tmp_path)
    assert refused.code is Code.CONFLICT
    assert refused.message == f"another server runs in {tmp_path}/d"
    # Now it comes as far as the model.
    assert "there is no model" in refusal(tmp_path).message


def test_a_child_that_outlives_its_launcher_does_not_keep_the_next_one_out(tmp_path: Path) -> None:
    """A lock belongs to every copy of the descriptor: one that a child inherits would hold it on."""
    with lock_folder(tmp_path):
        child = subprocess.Popen(
            [sys.executable, "-c", "print(flush=True); input()"],
            close_fds=False,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert child.stdout is not None
        child.stdout.readline()
    with child, lock_folder(tmp_path):
        child.communicate(b"\n", timeout=60)
    assert child.returncode == 0


def test_a_data_folder_that_others_can_look_into_is_refused(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d").chmod(0o755)
    refused = refusal(tmp_path)
    assert refused.code is Code.INVALID
    assert refused.hint == f"chmod 700 {tmp_path}/d"
    (tmp_path / "d").chmod(0o700)
    assert "there is no model" in refusal(tmp_path).message


def test_the_key_of_the_first_client_is_there_before_the_model_is_looked_for(tmp_path: Path) -> None:
    assert "there is no model" in refusal(tmp_path).message
    key = tmp_path / "d" / "api.key"
    assert key.read_text().startswith("tml-")
    assert key.stat().st_mode & 0o777 == 0o600
    first = key.read_text()
    refusal(tmp_path)
    assert key.read_text() == first
