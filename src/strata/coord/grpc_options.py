"""gRPC options that both ends of the coordinator's protocol share: the largest request and reply, keepalive pings, and
when a silent peer is given up.
"""

from __future__ import annotations

from typing import Final

MAX_REQUEST_BYTES: Final = 16 << 20
MAX_REPLY_BYTES: Final = 64 << 20

CLIENT_OPTIONS: Final = (
    # Workers of several jobs in one process must not share a connection: its break makes a worker suspect.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A coordinator whose machine vanished closes no connection: only unanswered pings reveal it. The timeout is longer
    # than a machine stands still at times: after such a pause it may be noticed before the response that waits.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 15_000),
    ("grpc.http2.ping_timeout_ms", 15_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MAX_REPLY_BYTES),
)
