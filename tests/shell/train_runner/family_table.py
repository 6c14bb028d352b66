"""What the training server makes of every model family, and the table of it in docs/families.md.

`python -m tests.shell.train_runner.family_table` writes the table, and the same as data for `strata models check`;
`test_families.py` holds every row of it to what comes out.
"""

from __future__ import annotations

import json
import re
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from strata.base.errors import Code, StrataError
from strata.train.core.model_options import LoraConfig
from strata.train.peft.layers import is_text
from strata.train.runner.collectives import RankGroup
from strata.train.runner.lora.targets import targets_of
from strata.train.runner.model.base import BaseModel
from strata.train.runner.model.startup_check import unpack_row
from strata.train.runner.passes.logprobs import PackedRow
from strata.train.runner.sampling.inference_model import InferenceModel, verify_decode_matches_training
from strata.train.runner.settings import RunnerSettings
from tests.shell.train_runner import tiny_families
from tests.shell.train_runner.single_rank import one_rank

DOCUMENT: Final = Path(__file__).parents[3] / "docs" / "families.md"
DATA: Final = Path(__file__).parents[3] / "src" / "strata" / "train" / "families.json"
BEGIN: Final = "<!-- families: begin -->"
END: Final = "<!-- families: end -->"
HEADING: Final = ("family", "result", "rows", "LoRA", "built-in sampler", "why")
NATS: Final = 1e-4
LENGTHS: Final = [23, 1, 14, 5]
"""Of documents in one row. The longest is longer than two of the windows and chunks of the tiny models."""
KINDS: Final = ("attn", "mlp", "unembed")


@dataclass(frozen=True)
class Outcome:
    family: str
    result: str
    """`equal`, `refused`, or `not built`: transformers itself makes or runs no tiny model of it here."""
    rows: str = ""
    lora: str = ""
    sampler: str = ""
    why: str = ""

    @property
    def row(self) -> str:
        cells = (self.family, self.result, self.rows, self.lora, self.sampler, self.why.replace("|", "/"))
        return "| " + " | ".join(cells) + " |"


def tokens() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(3, tiny_families.VOCABULARY, (sum(LENGTHS),), generator=generator)


def unmodified(folder: Path) -> Any:
    """The family's model as transformers computes it by itself."""
    kind = tiny_families.auto_class(AutoConfig.from_pretrained(str(folder)))
    return kind.from_pretrained(str(folder), dtype=torch.float32, attn_implementation="eager").train(mode=False)


@torch.no_grad()
def reference_logprobs(folder: Path) -> torch.Tensor:
    """Of every token of the vocabulary at every place, one document at a time."""
    model = unmodified(folder)
    parts = [model(input_ids=part[None], use_cache=False).logits[0] for part in torch.split(tokens(), LENGTHS)]
    return torch.log_softmax(torch.cat(parts).float(), dim=-1)


def outcome_of(family: str, folder: Path, ranks: RankGroup, training: Any = "lora") -> Outcome:
    """An AssertionError if it is accepted and wrong. Whatever else our code raises goes through: that is a crash."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tiny_families.make(family, folder)
            reference = reference_logprobs(folder)
        except Exception as error:  # noqa: BLE001 - whatever transformers raises, it was not built
            return Outcome(family, "not built", why=_first_line(error))
        try:
            base = base_of(folder, ranks, training)
        except StrataError as error:
            if error.code is not Code.UNSUPPORTED:
                raise
            return Outcome(family, "refused", why=_sentence(str(error)))
        apart = float((all_logprobs(base) - reference).abs().max())
        assert apart <= NATS, f"{family} was accepted and is off by {apart:.2g} nats"
        return Outcome(family, "equal", base.rows, *_uses(base, ranks))


def base_of(folder: Path, ranks: RankGroup, training: Any = "lora", **options: Any) -> BaseModel:
    settings = RunnerSettings(model=str(folder), training=training, sleep_folder=folder / "asleep", **options)
    return BaseModel(settings, ranks)


@torch.no_grad()
def all_logprobs(base: BaseModel) -> torch.Tensor:
    """What `reference_logprobs` is, by our pass."""
    logit_indices = torch.arange(sum(LENGTHS)).repeat_interleave(base.vocabulary)
    targets = torch.arange(base.vocabulary).repeat(sum(LENGTHS))
    row = PackedRow(tokens=tokens(), documents=list(LENGTHS), spans=(), logit_indices=logit_indices, targets=targets)
    return logprobs_of(base, row).view(-1, base.vocabulary)


def logprobs_of(base: BaseModel, row: PackedRow) -> torch.Tensor:
    """Those of a packed row, or of a row for each of its documents where the model takes no more."""
    rows = [row] if base.rows == "packed" else unpack_row(row)
    return torch.cat([base.logprobs(each) for each in rows])


def gradients(base: BaseModel) -> dict[str, torch.Tensor]:
    """Of all weights, of log probabilities with a weight each, by our pass."""
    content = tokens()
    row = PackedRow(
        tokens=content,
        documents=list(LENGTHS),
        spans=(),
        logit_indices=torch.arange(len(content)),
        targets=content.roll(-1),
    )
    (logprobs_of(base, row) * _loss_weights()).sum().backward()  # type: ignore[no-untyped-call]
    return {
        name: torch.zeros(parameter.shape) if parameter.grad is None else _whole(parameter.grad)
        for name, parameter in _text_parameters(base.lm)
    }


def _text_parameters(model: torch.nn.Module) -> Iterable[tuple[str, torch.nn.Parameter]]:
    """Named as in the text model alone, which is what transformers loads of some families that have towers."""
    for name, parameter in model.named_parameters():
        if is_text(name):
            yield name.replace("language_model.", ""), parameter


def reference_gradients(folder: Path) -> dict[str, torch.Tensor]:
    """The same by the unmodified model, one document at a time."""
    model, content = unmodified(folder), tokens()
    parts = [model(input_ids=part[None], use_cache=False).logits[0] for part in torch.split(content, LENGTHS)]
    logprobs = torch.log_softmax(torch.cat(parts).float(), dim=-1)[torch.arange(len(content)), content.roll(-1)]
    (logprobs * _loss_weights()).sum().backward()  # type: ignore[no-untyped-call]
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in _text_parameters(model)
    }


def _loss_weights() -> torch.Tensor:
    return torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(4))


def _whole(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def _uses(base: BaseModel, ranks: RankGroup) -> tuple[str, str, str]:
    """What can be adapted, whether it can be sampled, and why not."""
    if base.settings.full:
        return "", "", ""
    kinds, reasons = [], []
    for kind in KINDS:
        chosen = {f"train_{name}": name == kind for name in KINDS}
        try:
            targets_of(base.lm, LoraConfig(rank=1, alpha=1.0, **chosen))
            kinds.append(kind)
        except StrataError as error:
            reasons.append(str(error))
    twin = InferenceModel(base, ranks)
    trouble = verify_decode_matches_training(twin, base, ranks.device)
    reasons += [_sentence(trouble)] if trouble else []
    return ", ".join(kinds) or "no", "no" if trouble else "yes", "; ".join(reasons)


def _sentence(message: str) -> str:
    """Without its numbers, which are of one machine."""
    return re.sub(r" \(off by [^)]*\)", "", message)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:120]}" if lines else type(error).__name__


def rows(document: str) -> dict[str, str]:
    """The rows of the table by family."""
    table = document.partition(BEGIN)[2].partition(END)[0]
    found = [line for line in table.splitlines() if line.startswith("| ")][1:]
    return {line.split("|")[1].strip(): line for line in found}


def counts(lines: Iterable[str]) -> str:
    results = [line.split("|")[2].strip() for line in lines]
    said = [f"{results.count(result)} {result}" for result in ("equal", "refused", "not built")]
    return f"{len(results)} families: {', '.join(said)}."


def drawn(outcomes: Sequence[Outcome]) -> str:
    lines = [outcome.row for outcome in outcomes]
    head = ["| " + " | ".join(HEADING) + " |", "|" + "---|" * len(HEADING)]
    return "\n".join([BEGIN, "", counts(lines), "", *head, *lines, "", END])


def as_data(lines: Iterable[str]) -> bytes:
    """The rows as the package has them."""
    found = {}
    for line in lines:
        family, *cells = (cell.strip() for cell in line.removeprefix("| ").removesuffix(" |").split(" | "))
        named = zip(("result", "rows", "lora", "sampler", "why"), cells, strict=True)
        found[family] = {name: cell for name, cell in named if cell}
    return json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False).encode() + b"\n"


def main() -> None:
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory() as folder, one_rank(Path(folder)) as ranks:
        outcomes = [outcome_of(family, Path(folder) / family, ranks) for family in tiny_families.FAMILIES]
    document = DOCUMENT.read_text(encoding="utf-8")
    before, after = document.partition(BEGIN)[0], document.partition(END)[2]
    DOCUMENT.write_text(before + drawn(outcomes) + after, encoding="utf-8")
    DATA.write_bytes(as_data(outcome.row for outcome in outcomes))


if __name__ == "__main__":
    main()
