"""The pages of a training server without a hub: the same as at a hub."""

from __future__ import annotations

from strata.http.route import RESEARCHER, VIEWER, Route
from strata.web.page import Form, Page, View
from strata.web.pages.playground import MAX_FORM_BYTES, PlaygroundQuery, render_answer, render_playground
from strata.web.pages.rollouts import LONE, RolloutPageQuery, RolloutsPageQuery, render_rollout, render_rollouts
from strata.web.pages.training import ServerPage, TrainingPageQuery, render_server


async def server(page: Page, query: TrainingPageQuery) -> View:
    """This training server, and what it does for whom."""
    return await render_server(page, query, ServerPage(LONE.api, LONE.title))


async def rollouts(page: Page, query: RolloutsPageQuery) -> View:
    """The rollouts that the caller chose to keep."""
    return await render_rollouts(page, query, LONE)


async def rollout(page: Page, query: RolloutPageQuery) -> View:
    """One of them, token by token."""
    return await render_rollout(page, query, LONE)


async def playground(page: Page, query: PlaygroundQuery) -> View:
    """Try the base model and checkpoints."""
    return await render_playground(page, query, LONE)


async def answer(page: Page, form: Form) -> View:
    """The answer of a model to a prompt."""
    return await render_answer(page, form, LONE)


ROUTES = (
    Route("GET", "/", VIEWER, server),
    Route("GET", "/rollouts", RESEARCHER, rollouts),
    Route("GET", "/rollouts/{rollout_id}", RESEARCHER, rollout),
    Route("GET", "/playground", RESEARCHER, playground),
    Route("POST", "/playground", RESEARCHER, answer, MAX_FORM_BYTES, owner="tenant"),
)
