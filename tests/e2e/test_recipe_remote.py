"""A recipe against a server on another machine: by TLS, with a key, from a home folder that is empty."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from soak.train.server import make_model
from tests.e2e.nodes import network
from tests.support.kernel import lets_make_networks

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(not lets_make_networks(), reason="the kernel lets this process make no network namespaces"),
]
RECIPES: Final = Path(__file__).parents[2] / "examples" / "recipes"
PROXY: Final = Path(__file__).with_name("tls_proxy.py")
SERVER, CLIENT = "10.0.7.1", "10.0.7.2"
SERVED_PORT: Final = 5599
TLS_PORT: Final = 8443


def make_certificate(folder: Path) -> None:
    """Self-signed, by openssl: `ca.pem` for clients, `server.pem` with the key."""
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={SERVER}"]
    command += ["-addext", f"subjectAltName=IP:{SERVER}", "-keyout", "key.pem", "-out", "ca.pem"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=60)
    parts = [(folder / name).read_text(encoding="utf-8") for name in ("key.pem", "ca.pem")]
    (folder / "server.pem").write_text("".join(parts), encoding="utf-8")


def test_a_recipe_trains_on_a_server_behind_tls_from_an_empty_home(tmp_path: Path) -> None:
    served, home = tmp_path / "served", tmp_path / "home"
    served.mkdir()
    home.mkdir()
    make_model(served / "model")
    make_certificate(served)
    text = f'[server]\ndata = "data"\nport = {SERVED_PORT}\n[model]\npath = "model"\n[limits]\npack_tenants = false\n'
    (served / "server.toml").write_text(text, encoding="utf-8")
    recipe = (RECIPES / "sft.toml").read_text(encoding="utf-8").replace('tiny = "llama"\n', "")
    (home / "sft.toml").write_text(recipe.replace("steps = 60", "steps = 10"), encoding="utf-8")
    shutil.copytree(RECIPES / "data", home / "data")
    with network(SERVER, CLIENT) as (server, client):
        serving = server.start("OMP_NUM_THREADS=1 strata serve server.toml", served, tmp_path / "serve.log")
        serving.until_it_says("strata serve: http")
        proxy = f"{sys.executable} {PROXY} {SERVER} {TLS_PORT} server.pem {SERVED_PORT}"
        server.start(proxy, served, tmp_path / "proxy.log").until_it_says("proxy ready")
        shutil.copy(served / "data" / "api.key", home / "key")
        shutil.copy(served / "ca.pem", home / "ca.pem")
        environment = f"HOME={home} STRATA_CLIENT_CA={home}/ca.pem"
        command = f"{environment} strata train sft.toml --server https://{SERVER}:{TLS_PORT} --key-file key"
        training = client.start(command, home, tmp_path / "train.log")
        training.until_it_says("step  0/10")
        training.until_it_says("finished after step 10")
        assert training.end() == 0
        untrusted = client.start(
            f"HOME={home} strata train sft.toml --folder other --server https://{SERVER}:{TLS_PORT} --key-file key",
            home,
            tmp_path / "untrusted.log",
        )
        assert untrusted.end() != 0, "a certificate that no authority signed was trusted"
        assert "self-signed certificate" in untrusted.said()
    lines = (home / "runs" / "sft" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    values = [json.loads(line)["values"] for line in lines]
    assert values[-1]["loss"] < 0.9 * values[1]["loss"]
    assert (home / "runs" / "sft" / "adapter" / "adapter_model.safetensors").is_file()
    assert not (home / "runs" / "sft" / "server").exists(), "it started a server of its own"
