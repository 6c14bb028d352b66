"""What a released version stored stays as it is, and says nothing of the machine that it was written on."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from strata import __version__
from tests.rules.test_project_files import machine_words
from tests.shell.golden.folder import ENDING, GOLDEN, digests, read_released, version_in_development, versions

FEW_BYTES = 512 << 10


def test_no_file_of_a_released_version_has_changed() -> None:
    found = {version: digests(GOLDEN / version) for version in read_released()}
    assert found == read_released(), "a later version adds a folder of its own"


def test_only_the_folder_of_the_version_in_development_may_still_change() -> None:
    unreleased = set(versions()) - read_released().keys()
    in_development = {version_in_development()} if ".dev" in __version__ else set()
    assert unreleased <= in_development, "python -m scripts.golden freeze"


def test_a_version_is_released_with_its_files() -> None:
    assert ".dev" in __version__ or __version__ in read_released(), "python -m scripts.golden, then freeze"


def test_a_changed_an_added_and_a_removed_file_are_found(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "kept").write_bytes(b"kept")
    before = digests(tmp_path)
    (tmp_path / "added").write_bytes(b"added")
    assert digests(tmp_path) != before
    (tmp_path / "added").unlink()
    assert digests(tmp_path) == before
    (tmp_path / "part" / "kept").write_bytes(b"other")
    assert digests(tmp_path) != before


@pytest.mark.parametrize("version", versions())
def test_golden_files_are_small_and_name_no_machine(version: str) -> None:
    files = [file for file in (GOLDEN / version).rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= FEW_BYTES
    for file in files:
        content = gzip.decompress(file.read_bytes()) if file.suffix == ENDING else file.read_bytes()
        text = content.decode("utf-8", errors="replace")
        assert machine_words(text) == [], file
        assert "/tmp/" not in text, file
