"""Every endpoint of the server. What a training loop asks all the time stands first: routes are looked for in turn."""

from __future__ import annotations

from typing import Final

from strata.train.api import (
    archive,
    futures,
    inference,
    keys,
    sampling,
    service,
    sessions,
    status,
    tokenizer,
    training,
    weights,
)

TABLE: Final = (
    *futures.ENDPOINTS,
    *training.ENDPOINTS,
    *sampling.ENDPOINTS,
    *sessions.ENDPOINTS,
    *service.ENDPOINTS,
    *archive.ENDPOINTS,
    *weights.ENDPOINTS,
    *tokenizer.ENDPOINTS,
    *inference.ENDPOINTS,
    *keys.ENDPOINTS,
    *status.ENDPOINTS,
)
