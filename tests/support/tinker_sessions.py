"""Ends sessions of the `tinker` SDK."""

from __future__ import annotations

import contextlib
from typing import Final

import tinker

CLOSED_WITHIN_S: Final = 20.0


def end_session(service: tinker.ServiceClient) -> None:
    """Close a session without waiting for ever.

    In tinker 0.38 the wait may never end: a cancellation of its heartbeat task is lost when it arrives while httpx 0.28
    reads the body of a heartbeat's reply, and `close` waits for that task. The server has ended the session by then.
    """
    with contextlib.suppress(TimeoutError):
        service.close("success").result(timeout=CLOSED_WITHIN_S)
