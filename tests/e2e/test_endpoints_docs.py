"""docs/endpoints.md does what it says: its commands make a server, and its program gets a reply from it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from strata.base.settings import process_environment
from tests.e2e.blocks import blocks
from tests.e2e.served import served

pytestmark = pytest.mark.timeout(300)
PAGE: Final = Path(__file__).parents[2] / "docs" / "endpoints.md"
ADDRESS: Final = "http://127.0.0.1:5555"
BIN: Final = Path(sys.executable).parent


def test_the_programs_of_the_page_get_a_reply(tmp_path_factory: pytest.TempPathFactory) -> None:
    """On another port: somebody may have a server running here."""
    folder = tmp_path_factory.mktemp("t")
    page = list(blocks(PAGE.read_text(encoding="utf-8")))
    commands = [line.split() for block in page if block.language == "sh" for line in block.body.splitlines()]
    assert [command[1] for command in commands] == ["models", "serve"]
    make, serve = ([str(BIN / command[0]), *command[1:]] for command in commands)
    for block in page:
        if block.title is not None:
            (folder / block.title).write_text(block.body, encoding="utf-8")
    environment = {**process_environment(), "STRATA_SERVER_PORT": "0"}
    subprocess.run(make, cwd=folder, env=environment, check=True, timeout=120)
    with served(serve, folder, environment):
        address = (folder / "strata-train" / "api.address").read_text().strip()
        for name in ("chat.py", "stream.py"):
            program = folder / name
            assert ADDRESS in program.read_text()
            program.write_text(program.read_text().replace(ADDRESS, address))
            done = subprocess.run(
                [sys.executable, name], cwd=folder, capture_output=True, text=True, check=False, timeout=120
            )
            assert done.returncode == 0, done.stderr
            assert done.stdout.strip()
