"""Passes over images beside the unmodified model with PEFT and the processor of transformers: `torchrun … images
FOLDER`, or in the process of a test."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist
from peft import PeftModel
from PIL import Image
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from torch.distributed.fsdp import FSDPModule

from strata.train.api.images import decode_images
from strata.train.core import commands, ops
from strata.train.core.model_options import LoraConfig
from strata.train.images import read_image_form
from strata.train.runner.checkpoint.formats import to_peft
from strata.train.runner.model_runner import ModelRunner
from strata.train.runner.runner_dispatcher import RunnerDispatcher, follow
from strata.train.runner.settings import RunnerSettings
from strata.train.wire import tinker
from strata.train.wire.pass_request import PassRequest
from tests.shell.train_runner import family_table
from tests.shell.train_runner.driver import (
    Driver,
    Layout,
    Memory,
    apart_by,
    array_of,
    logprobs_of,
    loss_of,
    on_last,
    packed,
)
from tests.support import tiny_vision
from tests.support.ranks import join_ranks
from tests.support.tiny_vision import Piece, photo

LORA: Final = LoraConfig(rank=3, alpha=6.0, seed=1, train_unembed=False)
WIDE, TALL, SMALL = photo(1, 200, 90), photo(2, 60, 100), photo(3, 20, 20)
DOCUMENTS: Final[Sequence[Sequence[Piece]]] = (
    ([3, 4, 5, 6], WIDE, [7, 8, 9]),
    ([10, 11], TALL, [12, 13, 14], SMALL, [15, 16, 17, 18]),
    ([20, 21, 22, 23, 24],),
)
"""With one image, with two, with none."""


class Compared(msgspec.Struct, frozen=True):
    loss: float
    """How far apart the two are, of the larger."""
    logprobs: float
    """In nats."""
    gradients: float
    """Of the largest."""


def received(model: Path, documents: Sequence[Sequence[Piece]]) -> Sequence[ops.Datum]:
    """What ranks get of documents that the SDK sends."""
    given = types.ForwardBackwardInput(
        data=[tiny_vision.datum_of(each) for each in documents], loss_fn="cross_entropy", loss_fn_config=None
    )
    sent = forward_backward_request_to_proto(
        types.ForwardBackwardRequest(forward_backward_input=given, model_id="m", seq_id=1)
    )
    request = tinker.read_pass(sent.SerializeToString(), read_image_form(model))
    assert isinstance(request, PassRequest), request
    return decode_images(request).datums


def reference_logprobs(model: Any, pieces: Sequence[Piece]) -> torch.Tensor:
    """Log probabilities of the next tokens, by the unmodified model and processor."""
    tokens = torch.tensor([tiny_vision.prompt_of(pieces)])
    images = [tiny_vision.processed(piece) for piece in pieces if isinstance(piece, Image.Image)]
    options: dict[str, Any] = {}
    if images:
        height = max(each["pixel_values"].shape[2] for each in images)
        width = max(each["pixel_values"].shape[3] for each in images)
        padded = [
            torch.nn.functional.pad(values, (0, width - values.shape[3], 0, height - values.shape[2]))
            for values in (each["pixel_values"] for each in images)
        ]
        sizes = torch.cat([each["image_sizes"] for each in images])
        options = {"pixel_values": torch.cat(padded), "image_sizes": sizes}
    logits = model(input_ids=tokens, use_cache=False, **options).logits[0]
    return torch.log_softmax(logits, dim=-1)[torch.arange(tokens.shape[1]), [*tokens[0, 1:], 0]]


def compare(driver: Driver, folder: Path, layout: Layout) -> Compared:
    """A model that is no longer the base, over all documents."""
    datums = received(folder, DOCUMENTS)
    driver.create("m", LORA)
    driver.train("m", datums, layout=layout)
    driver.step("m", learning_rate=0.02)
    saved = driver.save("m", "m", "sampler_weights")
    assert isinstance(saved, ops.WeightsSaved), saved
    peft: Any = PeftModel.from_pretrained(
        family_table.unmodified(folder), str(driver.folder / "m"), is_trainable=True
    ).eval()
    theirs = [reference_logprobs(peft, each) for each in DOCUMENTS]
    weights = [torch.from_numpy(array_of(datum.inputs["weights"]).copy()) for datum in datums]
    loss = torch.stack([-(own * weight).sum() for own, weight in zip(theirs, weights, strict=True)]).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    result = driver.train("m", datums, layout=layout)
    gradients = {
        name.replace("default.", ""): value.grad for name, value in peft.named_parameters() if value.grad is not None
    }
    return Compared(
        loss=abs(loss_of(result) / float(loss) - 1),
        logprobs=max(
            float((torch.from_numpy(own.copy()) - each.detach()).abs().max())
            for own, each in zip(logprobs_of(result), theirs, strict=True)
        ),
        gradients=apart_by(gradients, to_peft(driver.gradient("m"))),
    )


def main(folder: Path) -> None:
    ranks = join_ranks(120)
    model = folder / "model"
    with ranks.collective_errors():
        if ranks.is_rank0:
            tiny_vision.make(model)
    for name, size, layout in (("sharded", 0, packed), ("uneven", 0, on_last), ("replicated", 1 << 30, packed)):
        settings = RunnerSettings(model=str(model), name="model", sleep_folder=folder / "asleep", replicated_bytes=size)
        runner = ModelRunner(settings, ranks)
        assert isinstance(runner.base.packed, FSDPModule) is (size == 0)
        if not ranks.is_rank0:
            follow(runner, ranks)
            continue
        link = Memory()
        dispatcher = RunnerDispatcher(runner, ranks, link, "kit")
        driver = Driver(dispatcher, link, ranks.size, folder / name)
        compared = compare(driver, model, layout)
        (folder / f"{name}.json").write_bytes(msgspec.json.encode(compared))
        dispatcher.run_once(commands.RankRequest(driver.generation, 1, commands.Shutdown()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
