"""One file for all processes of a server."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from pathlib import Path

import msgspec
import pytest
import zmq
from click.testing import CliRunner

from strata.base.clock import SystemClock
from strata.base.errors import Code, StrataError
from strata.cli.serve.commands import serve
from strata.train.launch.launcher import Launcher, api_server_command, orchestrator_command, rank_command
from strata.train.launch.preflight import (
    check_features,
    check_memory,
    check_mesh,
    report_experimental_features,
)
from strata.train.link.sockets import connect, listen
from strata.train.orchestrator.orchestrator import rules_of
from strata.train.plan.defaults import ResolvedSettings, resolve_settings
from strata.train.plan.devices import Hardware, available_memory
from strata.train.plan.model_cost import MemoryEstimate, estimate
from strata.train.plan.model_files import ModelFiles
from strata.train.settings import ServerSettings, load_settings

pytestmark = pytest.mark.proves("Never again: a training server loaded its model before it refused its address")


def written(folder: Path, text: str) -> Path:
    file = folder / "server.toml"
    file.write_text(text, encoding="utf-8")
    return file


def on_cpus(settings: ServerSettings) -> ResolvedSettings:
    return resolve_settings(settings, Hardware(memory_bytes=available_memory()), None)


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
    assert rules_of(settings).fairness_quantum_tokens == rules_of(settings).max_tokens_per_row == 4096
    assert settings.database == f"sqlite:{tmp_path}/journal.db"
    assert settings.stream == "train/default"
    assert settings.requests == f"ipc://{tmp_path}/run/requests"
    assert settings.rank0 == f"ipc://{tmp_path}/run/rank0"


def test_a_turn_in_the_queue_is_as_long_as_a_row_unless_it_is_set(tmp_path: Path) -> None:
    model = '[model]\npath = "m"\nmax_tokens_per_row = 512\n'
    unset = load_settings(written(tmp_path, model), environ={})
    assert rules_of(unset).fairness_quantum_tokens == 512
    fixed = load_settings(written(tmp_path, model + "[limits]\nfairness_quantum_tokens = 100"), environ={})
    assert (rules_of(fixed).fairness_quantum_tokens, rules_of(fixed).max_tokens_per_row) == (100, 512)


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


def test_sockets_are_reached_where_their_paths_are_too_long(tmp_path: Path) -> None:
    file = written(tmp_path, f'[server]\ndata = "{tmp_path / ("x" * 120)}"\n[model]\npath = "m"')
    endpoint = load_settings(file, environ={}).requests
    with zmq.Context() as context, context.socket(zmq.PULL) as pull, context.socket(zmq.PUSH) as push:
        pull.rcvtimeo = 10_000
        assert listen(pull, endpoint, None) == endpoint
        connect(push, endpoint)
        push.send(b"said")
        assert pull.recv() == b"said"
        assert Path(endpoint.removeprefix("ipc://")).is_socket()


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
    ranks = rank_command(on_cpus(settings), file, environment)
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


@pytest.mark.parametrize(
    ("ranks", "parallel", "training", "bytes_each"),
    [
        (2, "", "lora", 4 / 2),
        (2, "", "full", 16 / 2),
        (8, "", "full", 16 / 8),
        (8, "replicate = 2", "full", 16 / 4),
        (8, "tensor = 2", "full", 16 / 8),
        (4, "tensor = 4", "lora", 4 / 4),
        (4, "expert = 2", "full", 16 / 4),
        (1, "", "lora", 4),
    ],
)
def test_what_a_rank_needs_follows_from_the_weights_the_mesh_and_the_training(
    tmp_path: Path, ranks: int, parallel: str, training: str, bytes_each: float
) -> None:
    shapes = {"lm_head.weight": (1000, 100), "model.layers.0.weight": (10_100, 100)}
    model = f'[model]\npath = "{tmp_path}"\ntraining = "{training}"\nreplicated_mb = 0\n'
    file = written(tmp_path, f"{model}[ranks]\nnproc = {ranks}\n[parallel]\n{parallel}")
    settings = load_settings(file, environ={})
    # The largest layer is gathered, and one more of that size costs its shard alone.
    more = {f"model.layers.{number}.weight": (10_000, 100) for number in range(1, 9)}
    small, large = (estimate(settings, ModelFiles(each, {})) for each in (shapes, {**shapes, **more}))
    assert large.base - small.base == pytest.approx(8 * 10_000 * 100 * bytes_each, rel=1e-4)
    assert large.full > large.base


def test_a_small_frozen_base_counts_in_full_on_every_rank(tmp_path: Path) -> None:
    shapes = {"lm_head.weight": (1000, 100), "model.layers.0.weight": (100, 100)}
    settings = load_settings(written(tmp_path, '[model]\npath = "m"\n[ranks]\nnproc = 4'), environ={})
    small = estimate(settings, ModelFiles(shapes, {}))
    one_more = estimate(settings, ModelFiles({**shapes, "model.layers.1.weight": (100, 100)}, {}))
    assert one_more.base - small.base == 4 * 100 * 100


def test_of_an_expert_group_each_rank_computes_with_its_own_experts_alone(tmp_path: Path) -> None:
    model = ModelFiles({"model.layers.0.mlp.experts.gate_up_proj": (8, 1000, 100)}, {})

    def needed(expert: int) -> int:
        text = f'[model]\npath = "m"\nreplicated_mb = 0\n[ranks]\nnproc = 4\n[parallel]\nexpert = {expert}'
        return estimate(load_settings(written(tmp_path, text), environ={}), model).base

    assert needed(1) - needed(4) == 4 * (8 - 2) * 1000 * 100


def test_of_a_pipeline_the_stage_with_most_parameters_counts_with_its_adapters(tmp_path: Path) -> None:
    layers = {f"model.layers.{number}.mlp.up_proj.weight": (1000, 100) for number in range(5)}
    ends = {"model.embed_tokens.weight": (2000, 100), "model.norm.weight": (100,), "lm_head.weight": (2000, 100)}

    def needed(pipeline: int, training: str, *, tied: bool = False) -> MemoryEstimate:
        model = f'[model]\npath = "m"\nreplicated_mb = 0\ntraining = "{training}"\nmax_lora_rank = 8\nslots = 1\n'
        text = f"{model}[ranks]\nnproc = {pipeline}\n[parallel]\npipeline = {pipeline}"
        shapes = {**layers, **ends}
        if tied:
            del shapes["lm_head.weight"]
        files = ModelFiles(shapes, {"num_hidden_layers": 5})
        return estimate(load_settings(written(tmp_path, text), environ={}), files)

    # Weights, gradients and moments: the last of two stages has three layers and the head. It gathers no embeddings.
    elsewhere, embeddings = 2 * 1000 * 100 + 2000 * 100, 2000 * 100
    assert needed(1, "full").base - needed(2, "full").base == pytest.approx(16 * elsewhere + 4 * embeddings, rel=1e-3)
    # The embedding, that is the head, is on both ends.
    assert needed(2, "full").base == needed(2, "full", tied=True).base
    # Values, the gradients of a pass and of earlier passes, and moments.
    adapters = 8 * (3 * 1100 + 2100) * (4 + 4 + 4 + 8)
    with_adapters = needed(2, "lora")
    assert with_adapters.full - with_adapters.base >= adapters


def test_stages_are_refused_with_an_engine_that_would_wait_for_samplers(tmp_path: Path) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = f'[model]\npath = "{tmp_path}"\n[ranks]\nnproc = 2\n[parallel]\npipeline = 2\n'
    check_mesh(load_settings(written(tmp_path, text), environ={}))
    with pytest.raises(StrataError, match="ranks that are stages open no samplers"):
        check_mesh(load_settings(written(tmp_path, f'{text}[inference]\nengine = "vllm"\n'), environ={}))


@pytest.mark.parametrize("setting", ["compile", "offload"])
@pytest.mark.parametrize(
    ("more", "refused"),
    [
        ("", ""),
        ("[parallel]\nreplicate = 2\n", ""),
        ("[parallel]\ntensor = 2\n", "parallel.tensor"),
        ("[parallel]\npipeline = 2\n", "parallel.pipeline"),
        ('quantise = "nf4"\n', "model.quantise"),
    ],
)
def test_compiled_and_offloaded_layers_are_refused_where_they_were_never_tried(
    setting: str, more: str, refused: str, tmp_path: Path
) -> None:
    text = f'[ranks]\nnproc = 2\n[model]\npath = "{tmp_path}"\n{setting} = true\n{more}'
    settings = load_settings(written(tmp_path, text), environ={})
    if not refused:
        check_mesh(settings)
        return
    with pytest.raises(StrataError, match=f"model.{setting} is true, and {refused} is .* work.* alone"):
        check_mesh(settings)


def test_a_model_that_cannot_fit_is_refused_before_anything_starts(tmp_path: Path) -> None:
    weights(tmp_path, {"layer.weight": (10_000_000, 1_000_000)})
    (tmp_path / "config.json").write_text("{}")
    file = written(tmp_path, f'[model]\npath = "{tmp_path}"\n[ranks]\nbackend = "gloo"\nnproc = 4')
    settings = load_settings(file, environ={})
    with pytest.raises(StrataError, match=r"needs 5e\+04 GB on each of 4 ranks, and each has \d") as refused:
        check_memory(on_cpus(settings))
    assert refused.value.code is Code.INVALID


def test_a_mesh_of_another_size_than_the_ranks_is_refused_before_anything_starts(tmp_path: Path) -> None:
    for parallel, reason in (("replicate = 3", "does not divide"), ("tensor = 2", "parallel.tensor is 2")):
        text = f'{model_in(tmp_path)}[ranks]\nnproc = 4\n[parallel]\n{parallel}\n[server]\ndata = "{tmp_path / "data"}"'
        assert reason in str(refusal(tmp_path, text))


def test_a_model_that_fits_and_one_that_is_elsewhere_pass(tmp_path: Path) -> None:
    model_in(tmp_path)
    for path in (tmp_path, Path("some/hub-id")):
        settings = load_settings(written(tmp_path, f'[model]\npath = "{path}"\n[ranks]\nbackend = "gloo"'), environ={})
        assert (on_cpus(settings).rank_bytes or 0) > 0
        check_memory(on_cpus(settings))


# Before the model is loaded


def refusal(tmp_path: Path, text: str) -> StrataError:
    """Of `strata serve`, which has started nothing by then."""
    settings = load_settings(written(tmp_path, text), environ={})
    launcher = Launcher(on_cpus(settings), tmp_path / "strata.toml", {}, SystemClock())

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


def test_several_api_servers_on_one_unix_socket_are_refused_before_the_ranks_start(tmp_path: Path) -> None:
    own = f'[server]\nlisten = "unix"\napi_servers = 2\ndata = "{tmp_path / "data"}"\n'
    assert "server.api_servers" in refusal(tmp_path, model_in(tmp_path) + own).message


@pytest.mark.parametrize("path", ["/no/such/model", "no-such-model", "nobody/no-such-model", "not a model's id at all"])
def test_a_model_that_is_not_there_is_refused_before_the_ranks_start(tmp_path: Path, path: str) -> None:
    error = refusal(tmp_path, f'[model]\npath = "{path}"\n[server]\nport = 0\ndata = "{tmp_path / "data"}"\n')
    assert (error.code, error.message) == (Code.INVALID, f"there is no model in {path}")


@pytest.mark.parametrize(
    ("hosts", "why"),
    [
        ("count = 2", "hosts.count is 2, and hosts.listen says nothing"),
        ('listen = "first:5600"', "not IP:PORT with an IPv4 address"),
        ('listen = "192.0.2.7:5600"', "no interface of this host has the address 192.0.2.7"),
        ('listen = "127.0.0.1:5600"\n[ranks]\nmode = "connect"', "for ranks that the server starts"),
    ],
)
def test_hosts_that_could_not_join_are_refused_before_the_ranks_start(tmp_path: Path, hosts: str, why: str) -> None:
    settings = load_settings(written(tmp_path, f"{model_in(tmp_path)}[hosts]\n{hosts}\n"), environ={})
    with pytest.raises(StrataError, match=why) as refused:
        Launcher(on_cpus(settings), tmp_path / "strata.toml", {}, SystemClock())
    assert refused.value.code is Code.INVALID


def test_the_mesh_is_that_of_the_ranks_of_all_hosts(tmp_path: Path) -> None:
    text = f'{model_in(tmp_path)}[ranks]\nnproc = 2\n[hosts]\nlisten = "127.0.0.1:5600"\ncount = 3\n'
    check_mesh(load_settings(written(tmp_path, f"{text}[parallel]\nshard = 6\n"), environ={}))
    with pytest.raises(StrataError, match=r"parallel.shard 4 is 4, and there are 6 ranks"):
        check_mesh(load_settings(written(tmp_path, f"{text}[parallel]\nshard = 4\n"), environ={}))


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--join", "10.0.0.1:5600"], "--join needs --invite"),
        (["train.toml", "--join", "10.0.0.1:5600"], "CONFIG does not go with --join"),
        (["--join", "10.0.0.1", "--invite", "hosts.invite"], "is not IP:PORT"),
        (["--join", "10.0.0.1:0", "--invite", "hosts.invite"], "is not IP:PORT"),
        (["--join", "10.0.0.1:65536", "--invite", "hosts.invite"], "is not IP:PORT"),
        (["--join", ":5600", "--invite", "hosts.invite"], "is not IP:PORT"),
        (["--join", "10.0.0.1:5600", "--make-keys"], "--make-keys does not go with --join"),
        (["train.toml", "--invite", "hosts.invite"], "--invite goes with --join"),
        (["--data", "elsewhere"], "name a settings file or a model, or --join a server"),
    ],
)
def test_a_host_joins_by_an_address_and_an_invite_alone(arguments: list[str], why: str) -> None:
    said = CliRunner().invoke(serve, arguments)
    assert (said.exit_code, why in said.output) == (2, True), said.output


def test_a_section_with_a_spelling_mistake_is_refused_once(tmp_path: Path) -> None:
    with pytest.raises(StrataError) as refused:
        load_settings(written(tmp_path, '[model]\npath = "m"\n[limit]\ngap_s = 1\n'), environ={})
    (problem,) = refused.value.detail["problems"]
    assert problem.endswith('limit: unknown section (did you mean "limits"?)')


def test_every_section_of_the_server_can_stand_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "strata.toml"
    names = [section.name for section in msgspec.structs.fields(ServerSettings)]
    lines = {"model": 'path = "tiny"', "rollouts": "max_per_tenant = 3"}
    file.write_text("".join(f"[{name}]\n{lines.get(name, '')}\n" for name in names), "utf-8")
    assert load_settings(file, environ={}).rollouts.limits.per_tenant == 3


def test_a_server_logs_what_is_experimental_alone_or_with_its_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "phi3"}))
    start = f'[ranks]\nnproc = 2\nbackend = "gloo"\n[model]\npath = "{tmp_path}"\n'
    for text, names in (
        ("", []),
        ("compile = true\n", ["compiled layers"]),
        ("[parallel]\ncontext = 2\n", ["parallel.context"]),
    ):
        caplog.clear()
        report_experimental_features(on_cpus(load_settings(written(tmp_path, start + text), environ={})))
        lines = [record for record in caplog.records if record.getMessage() == "experimental_feature"]
        assert [record.__dict__["fields"]["name"] for record in lines] == names


@pytest.mark.parametrize("more", ['[ranks]\nmode = "connect"\n', '[hosts]\nlisten = "127.0.0.1:5600"\n'])
def test_only_ranks_of_the_launcher_on_one_host_take_turns_with_an_engine(tmp_path: Path, more: str) -> None:
    turns = '[model]\npath = "m"\n[inference]\nengine = "vllm"\nshare_devices = "turns"\n'
    check_features(load_settings(written(tmp_path, turns), environ={}))
    with pytest.raises(StrataError, match="take turns") as refused:
        check_features(load_settings(written(tmp_path, turns + more), environ={}))
    assert refused.value.code is Code.INVALID


def test_each_api_server_has_its_own_pair_of_ports(tmp_path: Path) -> None:
    text = '[server]\ntransport = "tcp"\nrequests_port = 7000\noutputs_port = 7001\n[model]\npath = "m"'
    settings = load_settings(written(tmp_path, text), environ={})
    assert (settings.requests_of(0), settings.outputs_of(0)) == ("tcp://127.0.0.1:7000", "tcp://127.0.0.1:7001")
    assert (settings.requests_of(1), settings.outputs_of(1)) == ("tcp://127.0.0.1:7002", "tcp://127.0.0.1:7003")


def test_the_length_of_a_slice_of_sampling_is_the_one_in_the_settings(tmp_path: Path) -> None:
    settings = load_settings(written(tmp_path, '[model]\npath = "m"\n[sampling]\nslice_steps = 7'), environ={})
    assert rules_of(settings).slice_steps == 7
