"""Adapters that PEFT made are brought to a whole server, say the same there, and are trained on by its ranks."""

from __future__ import annotations

import gc
import io
import json
import shutil
import tarfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import pytest
import tinker
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tinker import types
from transformers import AutoModelForCausalLM

from strata.base.errors import StrataError
from strata.base.secret import Secret
from strata.cli.main import run
from strata.fleet.client.hub_client import HubClient
from strata.sdk.checkpoints import import_adapter
from strata.train.peft.layers import ADAPTER, ADAPTER_CONFIG
from strata.train.runner.model.tiny import TinyModel, make
from tests.shell.train_api.processes import Processes, serving
from tests.support.tinker_sessions import end_session

# The SDK leaves sockets to the garbage collector, whose complaint would be taken for ours.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]
CLOSE: Final = 2e-4
"""How far the log-probabilities may be apart: float32, added in another order."""
PATIENCE_S: Final = 90.0
USUAL: Final = ["q_proj", "v_proj"]
ATTENTION: Final = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS: Final = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
SERIES: Final = [[(7 * place + 13 * token) % 500 for token in range(9)] for place in range(3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture: it has layers of every form that an adapter can have."""
    folder = tmp_path_factory.mktemp("m") / "model"
    make(folder, TinyModel(family="qwen3_moe"))
    return folder


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with serving(tmp_path_factory.mktemp("s"), model, ranks=2) as found:
        yield found
    with warnings.catch_warnings(action="ignore"):
        gc.collect()


@pytest.fixture(scope="module")
def hub(server: Processes) -> Iterator[HubClient]:
    with HubClient(server.url, bearer=Secret(server.key)) as client:
        yield client


def plain(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32, attn_implementation="eager")


def by_peft(model: Path, folder: Path, **options: Any) -> None:
    """Made, trained a little and saved by PEFT itself."""
    torch.manual_seed(1)
    made = get_peft_model(plain(model), LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, **options))
    optimizer = torch.optim.AdamW([own for own in made.parameters() if own.requires_grad], lr=0.02)
    for _ in range(2):
        optimizer.zero_grad()
        torch.cat([-logprobs(made, one) for one in SERIES]).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    # Else it saves the base's own embedding too as soon as the head is trained.
    made.save_pretrained(str(folder), save_embedding_layers=False)


def logprobs(model: Any, tokens: list[int]) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([tokens[:-1]])).logits[0]
    found: torch.Tensor = torch.log_softmax(logits.float(), -1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    return found


def batch() -> list[types.Datum]:
    made = []
    for tokens in SERIES:
        inputs: Any = {"target_tokens": tokens[1:], "weights": [1.0] * len(tokens[1:])}
        made.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    return made


def said(client: tinker.TrainingClient) -> list[float]:
    output = client.forward(batch(), "cross_entropy").result(PATIENCE_S)
    return [number for each in output.loss_fn_outputs for number in each["logprobs"].data]


def rewritten(change: Callable[[str, torch.Tensor], tuple[str, torch.Tensor] | None]) -> Callable[[Path], None]:
    """The tensors under other names, with other numbers, or left out."""

    def write(folder: Path) -> None:
        found = [change(name, tensor) for name, tensor in load_file(folder / ADAPTER).items()]
        save_file(dict(each for each in found if each is not None), folder / ADAPTER)

    return write


def untouched(folder: Path) -> None:
    assert (folder / ADAPTER).exists()


half: Final = rewritten(lambda name, tensor: (name, tensor.bfloat16()))
ADAPTERS: Final[dict[str, tuple[dict[str, Any], Callable[[Path], None]]]] = {
    "what most adapters have": ({"target_modules": USUAL}, untouched),
    "the same in bfloat16": ({"target_modules": USUAL}, half),
    "one layer": ({"target_modules": ["q_proj", "o_proj"], "layers_to_transform": [1]}, untouched),
    "the head alone": ({"target_modules": ["lm_head"]}, untouched),
    "every layer": ({"target_modules": [*ATTENTION, "lm_head"], "target_parameters": EXPERTS}, untouched),
}


@pytest.mark.parametrize("case", ADAPTERS)
def test_an_adapter_of_peft_says_the_same_here_and_is_trained_on(
    case: str, model: Path, server: Processes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options, change = ADAPTERS[case]
    by_peft(model, tmp_path / "peft", **options)
    change(tmp_path / "peft")
    name = case.replace(" ", "-")
    own = ["--server", server.url, "--key-file", str(server.data / "api.key")]
    assert run(["weights", "import", str(tmp_path / "peft"), "--name", name, *own]) == 0
    path = capsys.readouterr().out.strip()
    assert path.endswith(f"/weights/{name}")
    theirs = PeftModel.from_pretrained(plain(model), str(tmp_path / "peft"))
    expected = torch.cat([logprobs(theirs, one) for one in SERIES]).detach().numpy()
    base = torch.cat([logprobs(plain(model), one) for one in SERIES]).detach().numpy()
    assert np.abs(base - expected).max() > 100 * CLOSE
    service = tinker.ServiceClient(base_url=server.url, api_key=server.key)
    client = service.create_training_client_from_state(path)
    before = said(client)
    np.testing.assert_allclose(before, expected, atol=CLOSE)
    sampler = service.create_sampling_client(model_path=path)
    sampled = sampler.compute_logprobs(types.ModelInput.from_ints(SERIES[0])).result(PATIENCE_S)
    np.testing.assert_allclose(np.array(sampled[1:], dtype=float), expected[: len(SERIES[0]) - 1], atol=CLOSE)
    client.forward_backward(batch(), "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=1e-2)).result(PATIENCE_S)
    assert sum(said(client)) > sum(before)
    client.save_weights_for_sampler(name).result(PATIENCE_S)
    (folder,) = (server.data / "checkpoints").glob(f"*/sampler_weights/{name}@*")
    ours = PeftModel.from_pretrained(plain(model), str(folder))
    added = [own for each, own in ours.named_parameters() if "lora_B" in each]
    assert all(bool(own.any()) for own in added), "a layer is not trained on"
    # Loaded once more, also over what was trained, it is what it was.
    client.load_state(path).result(PATIENCE_S)
    assert said(client) == before
    end_session(service)


def test_the_server_is_the_one_that_was_logged_in_to_and_the_same_again_is_the_same(
    model: Path,
    adapter: Path,
    server: Processes,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert run(["weights", "import", str(adapter)]) != 0
    assert "strata login" in capsys.readouterr().err
    assert run(["login", server.url, "--token-file", str(server.data / "api.key")]) == 0
    for _ in range(2):
        assert run(["weights", "import", str(adapter)]) == 0
    first, second = capsys.readouterr().out.split()
    assert first == second
    # It is a checkpoint as any other: an adapter for PEFT with the same numbers, which names the base of this server.
    (folder,) = (server.data / "checkpoints").glob("*/weights/imported@*")
    assert run(["weights", "export", str(folder), str(tmp_path / "out"), "--format", "peft"]) == 0
    assert (tmp_path / "out" / ADAPTER).read_bytes() == (adapter / ADAPTER).read_bytes()
    whole = ["weights", "export", str(folder), str(tmp_path / "whole"), "--format", "hf"]
    assert run(whole) != 0
    assert "--base" in capsys.readouterr().err
    assert run([*whole, "--base", str(model)]) == 0
    theirs = PeftModel.from_pretrained(plain(model), str(adapter))
    torch.testing.assert_close(
        logprobs(plain(tmp_path / "whole"), SERIES[0]), logprobs(theirs, SERIES[0]), atol=CLOSE, rtol=0
    )


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("a") / "peft"
    by_peft(model, folder, target_modules=USUAL, target_parameters=EXPERTS)
    return folder


def changed(**settings: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / ADAPTER_CONFIG
        file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | settings), encoding="utf-8")

    return change


def renamed(old: str, new: str) -> Callable[[Path], None]:
    return rewritten(lambda name, tensor: (name.replace(old, new), tensor))


def replaced(name: str, data: bytes) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_bytes(data)

    return change


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / ADAPTER), folder / "adapter_model.bin")
    (folder / ADAPTER).unlink()


def longer(folder: Path) -> None:
    with (folder / ADAPTER).open("ab") as file:
        file.write(b"and more")


def tensors(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def exchanged(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    """As if the experts had been wrapped in the other order."""
    if "experts.base_layer" in name:
        return name.replace("experts.base_layer", "experts"), tensor
    return name.replace("experts.", "experts.base_layer."), tensor


Q: Final = b"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
REFUSED: Final[dict[str, tuple[Callable[[Path], None], str]]] = {
    "pickle": (pickled, "pickled weights are never read"),
    "nothing": (lambda folder: (folder / ADAPTER).unlink(), "cannot read"),
    "other kind": (changed(peft_type="IA3"), "'IA3' is not LORA"),
    "dora": (changed(use_dora=True), "use_dora"),
    "rslora": (changed(use_rslora=True), "use_rslora"),
    "the other way round": (changed(fan_in_fan_out=True), "fan_in_fan_out"),
    "bias": (changed(bias="all"), "biases"),
    "bias of lora": (changed(lora_bias=True), "lora_bias"),
    "modules to save": (changed(modules_to_save=["lm_head"]), "modules_to_save"),
    "ranks of layers": (changed(rank_pattern={"q_proj": 2}), "rank_pattern"),
    "alphas of layers": (changed(alpha_pattern={"q_proj": 2}), "alpha_pattern"),
    "replicated layers": (changed(layer_replication=[[0, 2]]), "layer_replication"),
    "unknown": (changed(of_next_year={"x": 1}), "of_next_year"),
    "another base": (changed(base_model_name_or_path="somebody/else"), "trained on 'else'"),
    "no base": (changed(base_model_name_or_path=None), "trained on ''"),
    "pissa": (changed(init_lora_weights="pissa"), "pissa"),
    "classifier": (changed(task_type="SEQ_CLS"), "SEQ_CLS"),
    "another rank": (changed(r=8), "the base needs"),
    "too large": (changed(r=65), "takes 1 to 64"),
    "none": (changed(r=0), "takes 1 to 64"),
    "no rank": (changed(r="four"), "cannot be read"),
    "no alpha": (changed(lora_alpha=0), "lora_alpha is 0"),
    "too many words": (changed(task_type="x" * (1 << 20)), "too long"),
    "unknown layers": (renamed("q_proj", "r_proj"), "the base has no layer"),
    "layers beyond": (renamed("layers.1.", "layers.7."), "the base has no layer"),
    "experts one by one": (renamed("experts.lora", "experts.0.down_proj.lora"), "the base has no layer"),
    "experts in the other order": (rewritten(exchanged), "the base needs"),
    "a weight of the base": (renamed("q_proj.lora_A", "q_proj.base_layer"), "save_embedding_layers=False"),
    "one of two": (
        rewritten(lambda name, tensor: None if "q_proj.lora_B" in name else (name, tensor)),
        "only one of A and B",
    ),
    "another shape": (rewritten(lambda name, tensor: (name, tensor.T.contiguous())), "the base needs"),
    "no numbers": (rewritten(lambda name, tensor: (name, tensor * float("nan"))), "not finite"),
    "infinite": (rewritten(lambda name, tensor: (name, (tensor / 0).bfloat16())), "not finite"),
    "whole numbers": (rewritten(lambda name, tensor: (name, tensor.int())), "not a contiguous tensor"),
    "no layers": (rewritten(lambda name, tensor: None), "holds no tensors"),
    "no json": (replaced(ADAPTER_CONFIG, b"\xff{"), "cannot be read"),
    "no tensors": (replaced(ADAPTER, b"no"), "not a file of tensors"),
    "a header without end": (replaced(ADAPTER, b"\xff" * 64), "header would have"),
    "a tensor that is not there": (
        replaced(ADAPTER, tensors(b'{"%s":{"dtype":"F32","shape":[4,64],"data_offsets":[0,1024]}}' % Q, b"")),
        "not a contiguous tensor",
    ),
    "more than tensors": (longer, "do not fill it"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_adapter_that_would_say_something_else_here_is_refused_in_words(
    case: str, adapter: Path, hub: HubClient, server: Processes, tmp_path: Path
) -> None:
    change, words = REFUSED[case]
    shutil.copytree(adapter, tmp_path / "peft")
    change(tmp_path / "peft")
    with pytest.raises(StrataError) as refused:
        import_adapter(hub, tmp_path / "peft", "refused")
    assert words in str(refused.value)
    assert not list((server.data / "checkpoints").glob("*/weights/refused@*"))
    assert not list((server.data / "imports").glob("*"))


def packed(**files: bytes) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name.replace("__", ".").replace("_UP_", "../"))
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return made.getvalue()


def linked() -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        member = tarfile.TarInfo(ADAPTER)
        member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(member)
    return made.getvalue()


@pytest.mark.parametrize(
    ("name", "body", "why"),
    [
        ("x", b"not a tar", "not a tar"),
        ("x", packed(adapter_config__json=b"{}"), f"there is no {ADAPTER}"),
        ("x", packed(adapter_model__bin=b"pickle"), "'adapter_model.bin' is none of"),
        ("x", packed(_UP_adapter_config__json=b"{}"), "'../adapter_config.json' is none of"),
        ("x", linked(), f"'{ADAPTER}' is none of"),
        ("../x", packed(), "name"),
    ],
)
def test_what_is_no_archive_of_an_adapter_is_refused(name: str, body: bytes, why: str, server: Processes) -> None:
    headers = {"X-API-Key": server.key, "Content-Type": "application/x-tar"}
    reply = httpx.post(f"{server.url}/api/v1/import_weights", params={"name": name}, content=body, headers=headers)
    assert reply.status_code == 400, reply.text
    assert why in reply.json()["error"]["message"]
