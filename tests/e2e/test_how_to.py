"""The pages of docs/how-to do what they say: their files are written, their commands run, their outputs compared.

Models of the Hugging Face Hub are tiny random ones of the same family, from a double of the Hub; vLLM is the fake that
passes the conformance suite of the real one. Only the ports differ: 5555 and 8443 may be in use here.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from strata.base.settings import process_environment
from strata.train.runner.model.tiny import TinyModel, make
from tests.e2e.how_to import ADDRESS, HUB_ADDRESS, ROOT, Reader, pages, runs
from tests.support.fake_vllm import make_fake_package
from tests.support.hugging_face import TOKEN, HuggingFaceDouble, Repository
from tests.support.ports import port_of, reserve_port

pytestmark = pytest.mark.timeout(600)
MODEL: Final = "Qwen/Qwen3-0.6B"
VLLM: Final = "/opt/vllm/bin/python"
PAGES: Final = [page for page in pages() if runs(page.read_text(encoding="utf-8"))]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HuggingFaceDouble]:
    folder = tmp_path_factory.mktemp("hub") / "model"
    make(folder, TinyModel(family="qwen3"))
    with HuggingFaceDouble() as double:
        double.repositories[MODEL] = Repository(files={file.name: file.read_bytes() for file in folder.iterdir()})
        yield double


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """One that other users may enter: jobs of an agent of root run as another one."""
    with tempfile.TemporaryDirectory(prefix="strata-") as name:
        Path(name).chmod(0o755)
        # A page may write beside its folder.
        folder = Path(name) / "new"
        folder.mkdir(mode=0o755)
        yield folder


@pytest.fixture
def vllm(tmp_path: Path) -> Path:
    """An interpreter in which vLLM is installed: the fake."""
    package = make_fake_package(tmp_path / "package")
    python = tmp_path / "vllm-python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={package} exec {sys.executable} "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    return python


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_does_what_it_says(
    page: Path, hub: HuggingFaceDouble, vllm: Path, open_folder: Path, tmp_path: Path
) -> None:
    folder = open_folder
    (folder / "examples").symlink_to(ROOT / "examples")
    with reserve_port() as guard, reserve_port() as hub_guard:
        addresses = {ADDRESS: f"127.0.0.1:{port_of(guard)}", HUB_ADDRESS: f"127.0.0.1:{port_of(hub_guard)}"}
        environment = {
            **process_environment(),
            "HOME": str(tmp_path),
            "HF_HOME": str(tmp_path / "hugging-face"),
            "HF_ENDPOINT": hub.url,
            "HF_TOKEN": TOKEN,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "STRATA_SERVER_PORT": str(port_of(guard)),
            "STRATA_HUB_LISTEN": addresses[HUB_ADDRESS],
            "STRATA_HUB_KEEP_FREE_BYTES": "0",
            "STRATA_AGENT_MIN_FREE_GIB": "0",
            "TINKER_TELEMETRY": "0",
            "PYTHONWARNINGS": "ignore",
        }
        reader = Reader(folder, environment, {**addresses, VLLM: str(vllm)})
        reader.follow(page.read_text(encoding="utf-8"))
    assert "\n\n".join(reader.problems) == ""


@pytest.mark.parametrize(
    ("shown", "fits"),
    [("one\nthree …\n", True), ("one\n…\n", True), ("three\n", False), ("three …\none\n", False), ("tw\n", False)],
)
def test_shown_lines_are_looked_for_in_their_order(shown: str, fits: bool, tmp_path: Path) -> None:
    text = f"```sh\nprintf 'one\\ntwo\\nthree 3\\n'\n```\n```text\n{shown}```\n"
    reader = Reader(tmp_path, process_environment(), {})
    reader.follow(text)
    assert (reader.problems == []) == fits


def test_a_command_that_fails_is_a_problem(tmp_path: Path) -> None:
    reader = Reader(tmp_path, process_environment(), {})
    reader.follow("```sh\ntrue\nfalse \\\n    || exit 3 | cat\n(exit 4)\n```\n")
    assert [problem.splitlines()[:2] for problem in reader.problems] == [["$ (exit 4)", "ended with status 4:"]]
