"""One file for all processes of a server."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from pathlib import Path

import pytest

from strata.base.clock import SystemClock
from strata.base.errors import Code, StrataError
from strata.train.launch.launcher import Launcher, api_server_command, orchestrator_command, rank_command
from strata.train.launch.preflight import available_bytes, check_memory, estimate
from strata.train.orchestrator.orchestrator import rules_of
from strata.train.settings import load_settings


def written(folder: Path, text: str) -> Path:
    file = folder / "server.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_a_file_with_only_a_model_is_a_server_on_loopback_with_everything_in_one_folder(tmp_path: Path) -> None:
    file = written(tmp_path, f'[server]\ndata = "{tmp_path}"\n[model]\npath = "/models/tiny-1"')
    settings = load_settings(file, environ={})
    assert (settings.server.host, settings.server.port) == ("127.0.0.1", 5555)
    assert (settings.limits.max_running_requests, settings.limits.max_pending_requests) == (2, 100)
    assert (settings.limits.operation_timeout_s, settings.limits.result_ttl_s) == (1800.0, 86_400.0)
    assert settings.model.base_model == "tiny-1"
    assert rules_of(settings).base_models == ("tiny-1", "/models/tiny-1")
    assert rules_of(settings).tenant_quota == settings.limits.max_pending_requests // 2
    assert rules_of(settings).max_models_per_tenant == settings.model.max_models // 2
    assert settings.database == f"sqlite:{tmp_path}/journal.db"
    assert settings.stream == "train/default"
    assert settings.requests == f"ipc://{tmp_path}/run/requests"
    assert settings.rank0 == f"ipc://{tmp_path}/run/rank0"


def test_over_tcp_the_ports_are_those_of_the_documents(tmp_path: Path) -> None:
    file = written(tmp_path, '[server]\ntransport = "tcp"\n[model]\npath = "m"')
    settings = load_settings(file, environ={})
    assert settings.requests == "tcp://127.0.0.1:6000"
    assert settings.outputs == "tcp://127.0.0.1:6001"
    assert settings.rank0 == "tcp://127.0.0.1:5556"


def test_problems_of_all_sections_are_told_at_once_with_their_lines(tmp_path: Path) -> None:
    file = written(tmp_path, '[server]\nport = "many"\n[limits]\nmax_runing_requests = 2\n[ranks]\nnproc = 0')
    with pytest.raises(StrataError) as refused:
        load_settings(file, environ={})
    told = str(refused.value)
    for words in ("server.port", "limits.max_runing_requests", "did you mean", "ranks.nproc", "model.path: required"):
        assert words in told


def test_the_environment_goes_before_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, '[model]\npath = "m"\n[ranks]\nnproc = 1')
    assert load_settings(file, environ={"STRATA_RANKS_NPROC": "4"}).ranks.nproc == 4


def test_a_path_too_long_for_a_socket_is_refused_with_what_to_do(tmp_path: Path) -> None:
    file = written(tmp_path, f'[server]\ndata = "/{"x" * 120}"\n[model]\npath = "m"')
    with pytest.raises(StrataError, match=r"server\.sockets"):
        _ = load_settings(file, environ={}).requests


# Processes


def test_no_process_sees_a_secret_it_has_no_use_for(tmp_path: Path) -> None:
    file = written(tmp_path, '[model]\npath = "m"')
    settings = load_settings(file, environ={})
    secret = "tml-very-secret"
    environment = {
        "PATH": "/bin",
        "STRATA_SERVER_OPERATOR_TOKEN": secret,
        "STRATA_SERVER_DATABASE": f"postgresql://u:{secret}@h/d",
        "STRATA_SERVER_IDENTITY_DATABASE": f"postgresql://u:{secret}@h/i",
    }
    ranks = rank_command(settings, file, environment)
    assert secret not in repr(ranks)
    orchestrator = orchestrator_command(file, "holder", environment)
    assert set(orchestrator.environment) == {"PATH", "STRATA_SERVER_DATABASE"}
    api_server = api_server_command(file, environment)
    assert "STRATA_SERVER_DATABASE" not in api_server.environment
    for command in (ranks, orchestrator, api_server):
        assert secret not in " ".join(command.arguments)


# Memory


def weights(folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """A file of weights that is nothing but its header: nobody reads further."""
    header = {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    encoded = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(encoded)) + encoded)


@pytest.mark.parametrize(("training", "bytes_each"), [("lora", 4), ("full", 16)])
def test_what_a_model_needs_follows_from_its_weights_and_how_it_is_trained(
    tmp_path: Path, training: str, bytes_each: int
) -> None:
    shapes = {"lm_head.weight": (1000, 100), "layer.weight": (100, 100)}
    file = written(tmp_path, f'[model]\npath = "{tmp_path}"\ntraining = "{training}"\n[ranks]\nnproc = 2')
    settings = load_settings(file, environ={})
    small, large = (estimate(settings, {**shapes, "more.weight": (rows, 100)}) for rows in (100, 10_100))
    assert large.base - small.base == 10_000 * 100 * bytes_each
    assert large.full > large.base


def test_a_model_that_cannot_fit_is_refused_before_anything_starts(tmp_path: Path) -> None:
    weights(tmp_path, {"layer.weight": (10_000_000, 1_000_000)})
    file = written(tmp_path, f'[model]\npath = "{tmp_path}"\n[ranks]\nbackend = "gloo"')
    settings = load_settings(file, environ={})
    with pytest.raises(StrataError, match=r"needs 4e\+04 GB, and there are \d") as refused:
        check_memory(settings)
    assert refused.value.code is Code.INVALID


def test_a_model_that_fits_and_one_that_is_elsewhere_pass(tmp_path: Path) -> None:
    weights(tmp_path, {"layer.weight": (10, 10)})
    for path in (tmp_path, Path("some/hub-id")):
        settings = load_settings(written(tmp_path, f'[model]\npath = "{path}"\n[ranks]\nbackend = "gloo"'), environ={})
        assert (available_bytes(settings) or 0) > 0
        check_memory(settings)


# Before the model is loaded


def refusal(tmp_path: Path, text: str) -> StrataError:
    """Of `strata serve`, which has started nothing by then."""
    settings = load_settings(written(tmp_path, text), environ={})
    launcher = Launcher(settings, tmp_path / "strata.toml", {}, SystemClock())

    async def run() -> None:
        await launcher.run(asyncio.Event(), lambda _: None)

    with pytest.raises(StrataError) as refused:
        asyncio.run(run())
    assert not (tmp_path / "data").exists()
    return refused.value


def model_in(tmp_path: Path) -> str:
    weights(tmp_path, {"layer.weight": (10, 10)})
    (tmp_path / "config.json").write_text("{}")
    return f'[model]\npath = "{tmp_path}"\n'


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5"])
def test_an_address_that_others_reach_is_refused_before_the_ranks_start(tmp_path: Path, host: str) -> None:
    error = refusal(tmp_path, f'{model_in(tmp_path)}[server]\nhost = "{host}"\ndata = "{tmp_path / "data"}"\n')
    assert "in the clear" in error.message


@pytest.mark.parametrize("servers", [1, 2])
def test_a_taken_port_is_refused_before_the_ranks_start(tmp_path: Path, servers: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        own = f'[server]\nport = {port}\napi_servers = {servers}\ndata = "{tmp_path / "data"}"\n'
        error = refusal(tmp_path, model_in(tmp_path) + own)
    assert f"cannot listen on 127.0.0.1:{port}" in error.message
    assert "server.port = 0" in (error.hint or "")


@pytest.mark.parametrize("path", ["/no/such/model", "no-such-model", "nobody/no-such-model", "not a model's id at all"])
def test_a_model_that_is_not_there_is_refused_before_the_ranks_start(tmp_path: Path, path: str) -> None:
    error = refusal(tmp_path, f'[model]\npath = "{path}"\n[server]\nport = 0\ndata = "{tmp_path / "data"}"\n')
    assert (error.code, error.message) == (Code.INVALID, f"there is no model in {path}")


def test_a_section_with_a_spelling_mistake_is_refused_once(tmp_path: Path) -> None:
    with pytest.raises(StrataError) as refused:
        load_settings(written(tmp_path, '[model]\npath = "m"\n[limit]\ngap_s = 1\n'), environ={})
    (problem,) = refused.value.detail["problems"]
    assert problem.endswith('limit: unknown section (did you mean "limits"?)')
