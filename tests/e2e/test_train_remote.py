"""Clients on another machine: they have the address of the server and a key, and nothing of its disk."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import pytest_asyncio

from soak.train.server import ServeProcess, make_model, serving

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.proves("Never again: `get_tokenizer()` and `strata weights export` worked on the server's disk only"),
]
STRATA: Final = str(Path(sys.executable).with_name("strata"))
CLIENT: Final = Path(__file__).with_name("remote_client.py")
HUB_ID: Final = "acme/tiny"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ServeProcess]:
    folder = tmp_path_factory.mktemp("r")
    make_model(folder / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STRATA_MODEL_TOKENIZER_ID", HUB_ID)
        async with serving(folder / "s", folder / "model", "real") as found:
            yield found


@pytest.fixture(scope="module")
def elsewhere(server: ServeProcess, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with nothing in it but a key."""
    home = tmp_path_factory.mktemp("elsewhere")
    (home / "key").write_text(server.key, encoding="utf-8")
    (home / "key").chmod(0o600)
    return home


def environment(server: ServeProcess, home: Path) -> Mapping[str, str]:
    return {
        "HOME": str(home),
        "PATH": os.environ["PATH"],  # noqa: TID251 - of the tests' own process
        "HF_ENDPOINT": f"{server.url}/hf",
        "HF_TOKEN": server.key,
        "TINKER_API_KEY": server.key,
        "TINKER_TELEMETRY": "0",
        "OMP_NUM_THREADS": "1",
    }


def run(server: ServeProcess, home: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=home, env=environment(server, home), capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture(scope="module")
def told(server: ServeProcess, elsewhere: Path) -> dict[str, Any]:
    """What the SDK said there."""
    done = run(server, elsewhere, sys.executable, str(CLIENT), server.url)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


async def test_the_tokenizer_of_the_unmodified_tinker_sdk_comes_from_the_server(told: dict[str, Any]) -> None:
    assert told["text"] == "Who asks twice gets the same answer twice."
    assert told["tokens"] > 1
    assert told["id"] == HUB_ID


async def test_the_command_fetches_the_same_tokenizer(server: ServeProcess, elsewhere: Path) -> None:
    done = run(server, elsewhere, STRATA, "models", "tokenizer", "tok", "--server", server.url, "--key-file", "key")
    assert done.returncode == 0, done.stderr
    there = Path(server.settings.model.path)
    for file in (elsewhere / "tok").iterdir():
        assert file.read_bytes() == (there / file.name).read_bytes()
    assert (elsewhere / "tok" / "tokenizer.json").is_file()


async def test_tokenizer_files_need_a_key_and_nothing_else_of_the_model_is_served(server: ServeProcess) -> None:
    async with httpx.AsyncClient(base_url=server.url) as http:
        own = {"Authorization": f"Bearer {server.key}"}
        at = f"/hf/{HUB_ID}/resolve/main"
        assert (await http.get(f"{at}/tokenizer.json")).status_code == 401
        assert (await http.get(f"{at}/tokenizer.json", headers=own)).status_code == 200
        refused = [f"{at}/{name}" for name in ("model.safetensors", "..%2Fserver.toml", "../../../server.toml")]
        for url in (*refused, "/hf/other/resolve/main/tokenizer.json"):
            assert (await http.get(url, headers=own)).status_code == 404, url


async def test_a_checkpoint_is_exported_over_http_and_says_nothing_of_the_servers_disk(
    server: ServeProcess, elsewhere: Path, told: dict[str, Any]
) -> None:
    where = ("--server", server.url, "--key-file", "key")
    done = run(server, elsewhere, STRATA, "weights", "export", told["path"], "adapter", "--format", "peft", *where)
    assert done.returncode == 0, done.stderr
    config = json.loads((elsewhere / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
    assert config["base_model_name_or_path"] == "tiny"
    shutil.copytree(server.settings.model.path, elsewhere / "base")
    export = (STRATA, "weights", "export", told["path"], "merged", "--format", "hf")
    done = run(server, elsewhere, *export, *where)
    assert done.returncode == 2, done.stderr
    assert "--base" in done.stderr
    done = run(server, elsewhere, *export, "--base", "base", *where)
    assert done.returncode == 0, done.stderr
    assert {"config.json", "model.safetensors"} <= {file.name for file in (elsewhere / "merged").iterdir()}
    here = ("--server", str(server.folder / "server.toml"))
    done = run(server, elsewhere, STRATA, "weights", "export", told["path"], "local", "--format", "peft", *here)
    assert done.returncode == 0, done.stderr
    for file in (elsewhere / "local").iterdir():
        assert file.read_bytes() == (elsewhere / "adapter" / file.name).read_bytes()


async def test_a_checkpoint_that_is_not_there_or_no_path_is_an_error_and_leaves_nothing(
    server: ServeProcess, elsewhere: Path
) -> None:
    for path, words in (("tinker://nobody/weights/x", "no checkpoint"), ("tinker://x", "no path of a checkpoint")):
        where = ("--server", server.url, "--key-file", "key")
        done = run(server, elsewhere, STRATA, "weights", "export", path, "none", "--format", "peft", *where)
        assert done.returncode != 0
        assert words in done.stderr
        assert not [*elsewhere.glob("*none*")]
