"""Every endpoint of the server. What a training loop asks all the time stands first: routes are looked for in turn."""

from __future__ import annotations

from typing import Final

from strata.train.api import futures, keys, later, sampling, service, sessions, training, weights

TABLE: Final = (
    *futures.ENDPOINTS,
    *training.ENDPOINTS,
    *sampling.ENDPOINTS,
    *sessions.ENDPOINTS,
    *service.ENDPOINTS,
    *weights.ENDPOINTS,
    *keys.ENDPOINTS,
    *later.ENDPOINTS,
)
