"""Pages of a training server without a hub: the routes of `training`, `playground` and `rollouts`."""

from __future__ import annotations

from strata.http.route import RESEARCHER, VIEWER, Route
from strata.web.pages import playground, rollouts, training

ROUTES = (
    Route("GET", "/", VIEWER, training.server),
    Route("GET", "/rollouts", RESEARCHER, rollouts.rollouts),
    Route("GET", "/rollouts/{rollout_id}", RESEARCHER, rollouts.rollout),
    Route("GET", "/playground", RESEARCHER, playground.playground),
    Route("POST", "/playground", RESEARCHER, playground.answer, playground.MAX_FORM_BYTES, owner="tenant"),
)
