"""Engines that cannot start, and when an engine hangs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from strata.base.errors import Code, StrataError
from strata.base.settings import process_environment
from strata.train.launch.engine_supervisor import EngineHealth, EngineProbe, check_engine
from strata.train.settings import load_settings
from tests.shell.train_endpoints.fake_engines import engine_settings
from tests.support.fake_vllm import make_fake_package


def serve(folder: Path, inference: str, model: str = "") -> subprocess.CompletedProcess[str]:
    file = folder / "server.toml"
    file.write_text(
        f'[server]\ndata = "{folder}/d"\nport = 0\nlog_level = "error"\n[model]\npath = "none"\n{model}'
        f'[ranks]\nmode = "connect"\n{inference}',
        encoding="utf-8",
    )
    return subprocess.run(
        [sys.executable, "-c", "from strata.cli.main import main; main()", "serve", str(file)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_an_engine_that_is_not_installed_is_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    missing = serve(tmp_path, '[inference]\nengine = "vllm"\npython = "/nowhere/python"\n')
    assert missing.returncode == 2
    assert "there is no interpreter /nowhere/python" in missing.stderr
    bare = serve(
        tmp_path, '[inference]\nengine = "vllm"\npython = "/usr/bin/python3"\nenvironment = {PYTHONPATH = ""}\n'
    )
    assert bare.returncode == 2
    assert "vLLM is not installed for /usr/bin/python3" in bare.stderr


def test_an_engine_is_refused_beside_a_quantised_base_whoever_starts_the_ranks(tmp_path: Path) -> None:
    refused = serve(tmp_path, '[inference]\nengine = "vllm"\npython = "/nowhere/python"\n', 'quantise = "nf4"\n')
    assert refused.returncode == 2
    assert "model.quantise is nf4, and inference.engine is vllm" in refused.stderr


def test_an_engine_that_dies_at_each_start_ends_the_server_with_its_last_words(tmp_path: Path) -> None:
    fault = "Model architectures ['Strange'] are not supported for now"
    ended = serve(
        tmp_path, engine_settings(make_fake_package(tmp_path / "p"), f'arguments = ["--fake-fault", "{fault}"]')
    )
    assert ended.returncode == 3
    assert "the engine engine-0 died 2 times before it was ready" in ended.stderr
    assert f"ValueError: {fault}" in ended.stderr
    assert f"{tmp_path}/d/logs/engine-0.log" in ended.stderr


def test_an_engine_hangs_when_it_has_requests_and_makes_no_tokens() -> None:
    def fault(health: EngineHealth, now_s: float) -> str | None:
        return health.fault(now_s, start_timeout_s=100.0, stall_s=10.0)

    health = EngineHealth(0.0)
    assert fault(health.observe(None, 99.0), 99.0) is None
    assert fault(health, 100.0) == "it was not ready after 100 seconds"
    health = health.observe(EngineProbe(0, 5.0), 20.0)
    idle = health.observe(EngineProbe(0, 5.0), 60.0)
    assert fault(idle, 60.0) is None
    busy = idle.observe(EngineProbe(3, 6.0), 61.0).observe(EngineProbe(3, 7.0), 80.0)
    assert fault(busy, 80.0) is None
    stuck = busy.observe(EngineProbe(3, 7.0), 90.0)
    assert fault(stuck, 90.0) == "it has requests, and made no token for 10 seconds"
    assert fault(busy.observe(None, 90.0), 90.0) == "it did not reply for 10 seconds"


def test_a_socket_whose_path_is_too_long_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    inference = engine_settings(make_fake_package(tmp_path / "p")).replace("[inference]\n", "")
    file = tmp_path / "server.toml"
    file.write_text(f'[server]\nsockets = "{tmp_path}/{"s" * 90}"\n[model]\npath = "x"\n[inference]\n{inference}')
    with pytest.raises(StrataError, match="107 are the most") as refused:
        check_engine(load_settings(file, environ={}), process_environment())
    assert refused.value.code is Code.INVALID
