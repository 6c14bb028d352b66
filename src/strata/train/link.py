"""The links between the processes of a server, by name. They are msgpack on ZMQ sockets, and nothing is ever unpickled.

Whoever listens does so in a folder of its owner alone, or behind CURVE keys. Bytes that are no message of ours are
logged and dropped: nobody who can write to a socket can end a process with it.
"""

from __future__ import annotations

from strata.train.api_link import ApiLink, OrchestratorClient
from strata.train.rank_link import Knock, RankConnection, RankLink, knock
from strata.train.sockets import keys_of, publish_address, read_address

__all__ = [
    "ApiLink",
    "Knock",
    "OrchestratorClient",
    "RankConnection",
    "RankLink",
    "keys_of",
    "knock",
    "publish_address",
    "read_address",
]
