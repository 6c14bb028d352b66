"""What a model is in the simulation: a hash over everything that was ever done to it, in order.

An operation that is lost, doubled, out of order, half done or done in another composition gives another hash, and the
result of every operation shows the hash that was there when it was done.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from strata.train.core import commands, model_options

_encode = msgspec.msgpack.Encoder(order="deterministic").encode


def linked(chain: bytes, *what: object) -> bytes:
    return hashlib.blake2b(chain + _encode(what), digest_size=8).digest()


def begun(model_id: str) -> bytes:
    return linked(b"", "model", model_id)


def composed(request_ids: Sequence[str], rows: Sequence[Sequence[commands.Row]]) -> bytes:
    """Real ranks give other last bits for another packing."""
    return linked(b"", list(request_ids), rows)


def passed(chain: bytes, data: bytes, *, forward_only: bool, composition: bytes) -> bytes:
    return linked(chain, "forward" if forward_only else "pass", data, composition)


def stepped(chain: bytes, params: model_options.AdamParams | model_options.MuonParams) -> bytes:
    return linked(chain, "step", params)


def aborted(chain: bytes) -> bytes:
    return linked(chain, "abort")


def loaded(saved: bytes, *, optimizer: bool) -> bytes:
    return linked(saved, "load", optimizer)


def shown(chain: bytes) -> dict[str, float]:
    """As the metrics of a step: exact in a float."""
    return {"chain": float(int.from_bytes(chain[:6], "big"))}


def weight(chain: bytes) -> float:
    """Of a sampler: exact in a float32, also less one."""
    return float(int.from_bytes(chain[:2], "big"))
