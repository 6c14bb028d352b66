"""What belongs to the protocol and is not served, such as inference engines beside this server.

One list, so that a client is told in words and a reader of the documents can compare.
"""

from __future__ import annotations

from typing import Final

from strata.base.errors import Code, StrataError
from strata.http.declare import MIB, RESEARCHER, Answer, Endpoint, Method
from strata.train.api.site import Call

PATHS: Final[tuple[tuple[Method, str], ...]] = (
    ("POST", "/api/v1/join_sampling_session"),
    ("POST", "/api/v1/retrieve_futures"),
    ("POST", "/api/v1/save_weights_external"),
    ("POST", "/api/v1/copy_weights"),
    ("POST", "/api/v1/create_custom_loss"),
    ("POST", "/api/v1/sync_inference_weights"),
    ("POST", "/add_inference_endpoint"),
    ("POST", "/remove_inference_endpoint"),
    ("GET", "/list_inference_endpoints"),
)


async def unserved(call: Call) -> Answer:
    """Not served by this version."""
    del call
    raise StrataError(Code.UNSUPPORTED, "this server does not serve it", hint="see docs/limits.md")


ENDPOINTS = tuple(Endpoint(method, path, RESEARCHER, unserved, 16 * MIB) for method, path in PATHS)
