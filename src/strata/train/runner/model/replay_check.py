"""The check before the first router replay: whether the routers of a model choose what they are told to."""

from __future__ import annotations

from typing import Final

import torch

from strata.base.errors import StrataError
from strata.train.runner.collectives import RankGroup
from strata.train.runner.model.base import BaseModel
from strata.train.runner.model.startup_check import FAILURES, TOLERANCE, first_line
from strata.train.runner.passes.logprobs import PackedRow
from strata.train.runner.router_replay import NOT_REPLAYED

CHECKED_TOKENS: Final = 16


def verify_router_replay(base: BaseModel, ranks: RankGroup) -> str:
    """Says why routing cannot be replayed here, or an empty string. All ranks call this together.

    A row is computed twice: with a choice that no router would make, by which it has to be computed; and with the one
    that was made, which must change nothing.
    """
    settings, routers = base.settings, base.routers
    if not routers.layers:
        return f"{base.arch} has no experts, or experts of a form that computes them itself"
    if settings.compile_folder is not None:
        return "routers of compiled layers cannot be told what to choose: leave model.compile out"
    if settings.parallel.tensor > 1:
        return "ranks of a tensor group have slices of a row between blocks, and this version replays whole rows"
    if settings.parallel.pipeline > 1:
        return "ranks that are stages cannot sample, so there is nothing to replay"
    try:
        problem = _compare(base, ranks.device)
    except StrataError as error:
        problem = error.message
    except FAILURES as error:
        problem = f"its code fails with {type(error).__name__}: {first_line(error)}"
    if ranks.all_reduce_any([bool(problem)])[0]:
        return f"routers of {base.arch} cannot be replayed here: {problem or 'another rank says why'}"
    return ""


@torch.no_grad()
def _compare(base: BaseModel, device: torch.device) -> str:
    context = base.mesh.context
    trained, chosen = _record(base, _row(base, device, None))
    row = _row(base, device, _plant(base, device))
    planted = row.slice_for(context.rank, context.size)[0].routing
    assert planted is not None
    _, followed = _record(base, row)
    if not bool((followed == torch.where(planted == NOT_REPLAYED, followed, planted)).all()):
        return "they choose otherwise than they are told"
    if context.size > 1:
        # What was chosen is known of this rank's slice alone.
        return ""
    replayed, _ = _record(base, _row(base, device, chosen.to(torch.int32)))
    difference = float((trained - replayed).abs().max())
    return "" if difference <= TOLERANCE[base.settings.dtype] else f"a replay is off by {difference:.2g} nats"


def _row(base: BaseModel, device: torch.device, routing: torch.Tensor | None) -> PackedRow:
    tokens = torch.randint(base.vocabulary, (CHECKED_TOKENS,), generator=torch.Generator().manual_seed(2)).to(device)
    indices = torch.arange(CHECKED_TOKENS - 1, device=device)
    return PackedRow(tokens, [CHECKED_TOKENS], (), indices, tokens[1:], routing=routing)


def _plant(base: BaseModel, device: torch.device) -> torch.Tensor:
    """Other experts for each token and each layer, and for the last token none."""
    routers = base.routers
    tokens, layers, places = (torch.arange(each) for each in (CHECKED_TOKENS, routers.layers, routers.per_token))
    planted = (tokens[:, None, None] + layers[:, None] + places) % routers.experts
    planted[-1] = NOT_REPLAYED
    return planted.to(device, torch.int32)


def _record(base: BaseModel, row: PackedRow) -> tuple[torch.Tensor, torch.Tensor]:
    """The log probabilities of a row, and the experts that computed this rank's tokens."""
    base.routers.start_recording()
    logprobs = base.logprobs(row)
    return logprobs, base.routers.take_recorded()
