"""Images in passes: losses, log probabilities and gradients are those of the unmodified model with PEFT and its own
processor, on one rank and on two, and what a model does not take is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pytest
import torch

from strata.train.core import ops
from strata.train.images import ImageForm, read_image_form
from strata.train.runner.collectives import RankGroup
from strata.train.runner.model.base import BaseModel
from strata.train.runner.settings import RunnerSettings
from tests.shell.train_runner import tiny_families
from tests.shell.train_runner.driver import apart, logprobs_of, packed
from tests.shell.train_runner.images import DOCUMENTS, LORA, Compared, compare, received
from tests.shell.train_runner.single_rank import driver_of, one_rank
from tests.support import tiny_vision
from tests.support.torchrun import run_on_ranks

LONGEST_S: Final = 240
NATS: Final = 1e-4
CLOSE: Final = 2e-4

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankGroup]:
    with one_rank(tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision") / "model"
    tiny_vision.make(folder)
    return folder


def check(compared: Compared) -> None:
    assert compared.logprobs <= NATS
    assert compared.loss <= NATS
    assert compared.gradients <= CLOSE


@pytest.mark.proves("a pass over images of the family mistral3 is that of the unmodified model and its processor")
def test_a_pass_over_images_is_that_of_the_unmodified_model(ranks: RankGroup, model: Path, tmp_path: Path) -> None:
    driver = driver_of(ranks, model, tmp_path)
    assert isinstance(driver.dispatcher._runner.base.images, ImageForm)
    check(compare(driver, model, packed))


@pytest.mark.timeout(LONGEST_S + 20)
def test_two_ranks_with_different_numbers_of_images_compute_the_same(tmp_path: Path) -> None:
    run_on_ranks("tests.shell.train_runner.images", 2, str(tmp_path), within_s=LONGEST_S)
    for name in ("sharded", "uneven", "replicated"):
        check(msgspec.json.decode((tmp_path / f"{name}.json").read_bytes(), type=Compared))


def test_an_image_has_the_same_numbers_beside_others_and_twice(ranks: RankGroup, model: Path, tmp_path: Path) -> None:
    driver = driver_of(ranks, model, tmp_path)
    driver.create("m", LORA)
    datums = received(model, DOCUMENTS)
    results = [
        logprobs_of(driver.train("m", datums, layout=layout, forward_only=True)) for layout in (packed, packed, apart)
    ]
    for one, again, alone in zip(*results, strict=True):
        assert np.array_equal(one, again)
        np.testing.assert_allclose(one, alone, atol=1e-5)


def test_another_image_gives_other_numbers(ranks: RankGroup, model: Path, tmp_path: Path) -> None:
    driver = driver_of(ranks, model, tmp_path)
    driver.create("m", LORA)
    (datum,) = received(model, DOCUMENTS[:1])
    (image,) = datum.images
    darker = msgspec.structs.replace(image, pixels=bytes(value // 2 for value in image.pixels))
    both = [datum, msgspec.structs.replace(datum, images=[darker])]
    one, other = logprobs_of(driver.train("m", both, forward_only=True))
    before = image.start
    assert np.abs(one[before:] - other[before:]).max() > 0.1
    np.testing.assert_allclose(one[: before - 1], other[: before - 1], atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [{"start": 3}, {"start": -1}, {"start": 10**6}, {"width": 1}, {"height": 0}, {"height": 10**6}, {"pixels": b"x"}],
    ids=str,
)
def test_an_image_that_is_not_what_its_tokens_say_fails_its_own_operation(
    ranks: RankGroup, model: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    driver = driver_of(ranks, model, tmp_path)
    driver.create("m", LORA)
    (datum,) = received(model, DOCUMENTS[:1])
    wrong = msgspec.structs.replace(datum, images=[msgspec.structs.replace(datum.images[0], **changes)])
    refused, computed = driver.passes(("m", [wrong]), ("m", [datum]))
    assert isinstance(refused, ops.Failed)
    assert "datum 0: the image at token" in refused.message
    assert isinstance(computed, ops.PassDone)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"quantise": "int8"}, "model.quantise is int8: images were compared with LoRA"),
        ({"training": "full"}, "model.training is full: images were compared with LoRA"),
    ],
)
def test_a_server_of_other_settings_takes_text_alone_and_says_why(
    ranks: RankGroup, model: Path, tmp_path: Path, options: dict[str, Any], why: str
) -> None:
    driver = driver_of(ranks, model, tmp_path, **options)
    driver.create("m", None if "training" in options else LORA)
    text, image = received(model, [DOCUMENTS[2], DOCUMENTS[0]])
    driver.train("m", [text])
    (refused,) = driver.passes(("m", [image]))
    assert isinstance(refused, ops.Failed)
    assert f"datum 0: it has images: {why}" in refused.message


def test_other_families_take_no_images(ranks: RankGroup, tmp_path: Path) -> None:
    tiny_families.make("gemma3", tmp_path / "model")
    base = BaseModel(RunnerSettings(model=str(tmp_path / "model"), sleep_folder=tmp_path), ranks)
    assert base.images == "gemma3 takes no images here, only mistral3"


def test_a_tower_that_computes_otherwise_takes_no_images(
    ranks: RankGroup, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start-up check notices: here the tower would compute in another way than its own."""
    from strata.train.runner.model.images import TowerEncoder

    def dark(self: TowerEncoder, pixels: torch.Tensor) -> torch.Tensor:
        return own(self, pixels) * 0.9

    own = TowerEncoder._features
    monkeypatch.setattr(TowerEncoder, "_features", dark)
    base = BaseModel(RunnerSettings(model=str(model), sleep_folder=tmp_path), ranks)
    assert isinstance(base.images, str)
    assert "with an image, its log probabilities are not those of the unmodified model" in base.images


@pytest.mark.parametrize(
    ("file", "changes", "why"),
    [
        ("preprocessor_config.json", {"resample": 2}, "asks for what is not computed here"),
        ("preprocessor_config.json", {"image_processor_type": "CLIPImageProcessor"}, "asks for what is not computed"),
        ("preprocessor_config.json", {"size": {"shortest_edge": 32}}, "asks for what is not computed here"),
        ("preprocessor_config.json", None, "its preprocessor_config.json cannot be read"),
        ("tokenizer.json", {"added_tokens": []}, r"its tokenizer.json has no token \[IMG\]"),
        ("tokenizer.json", None, "its tokenizer.json cannot be read"),
        ("config.json", {"image_token_index": 7}, "have different tokens for images"),
    ],
)
def test_files_that_ask_for_other_images_are_named(
    model: Path, tmp_path: Path, file: str, changes: dict[str, Any] | None, why: str
) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    if changes is None:
        (folder / file).unlink()
    else:
        content = json.loads((folder / file).read_bytes())
        (folder / file).write_text(json.dumps(content | changes), encoding="utf-8")
    with pytest.raises(Exception, match=why):
        read_image_form(folder)


def test_a_processor_saved_by_transformers_5_is_read_too(model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    (folder / "preprocessor_config.json").unlink()
    processor = {"image_processor": tiny_vision.PROCESSOR, "image_token": "[IMG]", "patch_size": 16}
    (folder / "processor_config.json").write_text(json.dumps(processor), encoding="utf-8")
    assert read_image_form(folder) == read_image_form(model)
