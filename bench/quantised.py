"""Quantised bases beside those in bfloat16 and float32: `python -m bench quantised`.

One gloo rank holds a base of about 130 million parameters and trains a LoRA adapter on rows of 256 tokens. Lines
`loading` and `training` are peaks of anonymous memory above what the process had before, in MiB; bare is the base in
float32. The arithmetic is in bfloat16, and in float32 for that base.

Lines `distance` are of a small model that a plain loop of torch trains on the documents of this repository first: the
mean difference of a token's log probability, in nats, between the base as it is and the quantised one, both in float32,
on a document that it has not seen. Bare is the mean log probability itself, without its sign.
"""

from __future__ import annotations

import ctypes
import tempfile
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench import plan
from bench.interleave import Comparison
from bench.loading import sampled
from bench.report import Report
from strata.train.plan.memory_plan import MemoryRecipe, MeshShape
from strata.train.plan.quantisation import NF4_BLOCK, Quantise
from strata.train.runner.model import process_memory
from strata.train.runner.model.loading import RankPart, build_skeleton, load_lm, load_sharded
from strata.train.runner.model.quantised import quantise_rows
from strata.train.runner.model.tiny import TinyModel, make

BASE: Final = TinyModel(family="llama", layers=12, hidden=1024, vocabulary=8192)
LEARNED: Final = TinyModel(family="llama", layers=4, hidden=256, vocabulary=512)
DOCUMENTS: Final = Path(__file__).parents[1] / "docs"
UNSEEN: Final = "glossary.md"
LENGTH: Final = 128
ROWS: Final = 8
BASES: Final[dict[str, tuple[str, Quantise]]] = {
    "float32": ("float32", ""),
    "bfloat16": ("bfloat16", ""),
    "int8": ("bfloat16", "int8"),
    "nf4": ("bfloat16", "nf4"),
}
MICRO: Final = 1_000_000
"""Processes return integers: a distance is counted in millionths."""


async def run(report: Report, *, quick: bool) -> None:
    torch.set_num_threads(1)
    for option in (plan.M_TRIM_THRESHOLD, plan.M_MMAP_THRESHOLD):
        ctypes.CDLL(None).mallopt(option, 1 << 16)
    with tempfile.TemporaryDirectory(prefix="bench-quantised-") as name:
        folder = Path(name)
        plan._run_all([partial(make_base, folder / "model")], folder / "made")
        found: dict[str, tuple[int, int, int]] = {}
        for base in BASES:
            report.progress(base)
            found[base] = measure(base, folder)
            for place, what in enumerate(("loading", "training")):
                ours, bare = (found[each][place] / 2**20 for each in (base, "float32"))
                note = f"{found[base][2] / found[base][1]:.2f} of it planned" if what == "training" else ""
                report.add(f"{what} {base}", "MiB", Comparison([ours], [bare], "lower"), note=note)
        report.progress("training a small model")
        plan._run_all([partial(learn, folder / "learned", 20 if quick else 60)], folder / "learning")
        for kind in ("int8", "nf4"):
            (away, whole) = (
                plan._run_all([partial(distance, folder / "learned", each)], folder / f"distance-{each}")[0] / MICRO
                for each in (kind, "")
            )
            report.add(f"distance {kind}", "nats", Comparison([away], [whole], "lower"))


def make_base(folder: Path) -> int:
    """With weights as small as those of a model of this width at its beginning: larger ones are too wide for bfloat16,
    and the start-up check would refuse them."""
    parameters = make(folder, BASE)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(0.2)
    model.save_pretrained(folder)
    return parameters


def measure(base: str, folder: Path) -> tuple[int, int, int]:
    """Peaks of loading and of training, and the plan."""
    dtype, quantise = BASES[base]
    recipe = msgspec.convert(
        {
            "dtype": dtype, "quantise": quantise, "row_tokens": 256, "cached_tokens": 0, "replicated_bytes": 0,
            "lora_rank": 16, "device": "cpu",
        },
        MemoryRecipe,
    )  # fmt: skip
    case = plan.PlanCase(base, BASE, recipe, MeshShape())
    model = str(folder / "model")
    (planned,) = plan._run_all([partial(plan._plan, case, model)], folder / f"{base}-planned")
    (loading,) = plan._run_all([partial(load, model, dtype, quantise)], folder / f"{base}-loading")
    place = folder / base
    place.mkdir()
    (training,) = plan._run_all([partial(plan._measure, case, model, 0, place)], folder / f"{base}-training")
    return loading, training, planned


def load(model: str, dtype: str, quantise: Quantise) -> int:
    """The peak of memory while a rank that is alone loads all of a base."""
    kept = getattr(torch, dtype)
    build_skeleton(model, kept)
    if quantise:
        quantise_rows(torch.zeros(1, NF4_BLOCK), quantise)
    process_memory.release_memory()
    with sampled() as peak:
        load_sharded(model, kept, torch.device("cpu"), RankPart(lambda _: None), quantise)
    return peak[0]


def learn(folder: Path, steps: int) -> int:
    """A plain loop, without anything of this project but the shape of the model and its tokenizer."""
    make(folder, LEARNED)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).train()
    tokens = torch.cat([encode(folder, file) for file in sorted(DOCUMENTS.glob("*.md")) if file.name != UNSEEN])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    chance = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(tokens) - LENGTH, (ROWS,), generator=chance)
        rows = torch.stack([tokens[start : start + LENGTH] for start in starts.tolist()])
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return steps


def encode(folder: Path, file: Path) -> torch.Tensor:
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return torch.tensor(tokenizer(file.read_text("utf-8"), verbose=False)["input_ids"])


def distance(folder: Path, quantise: Quantise) -> int:
    """In millionths of a nat: of the quantised model from the one as it is, or of that from certainty."""
    tokens = encode(folder, DOCUMENTS / UNSEEN)
    rows = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)
    plain = logprobs(load_lm(str(folder), torch.float32), rows)
    if not quantise:
        return int(-plain.mean() * MICRO)
    lm = load_sharded(str(folder), torch.float32, torch.device("cpu"), RankPart(lambda _: None), quantise)
    return int((logprobs(lm, rows) - plain).abs().mean() * MICRO)


@torch.no_grad()
def logprobs(lm: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    values = torch.log_softmax(lm(input_ids=rows).logits[:, :-1], dim=-1)
    return values.gather(-1, rows[:, 1:, None])
