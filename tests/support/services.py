"""`python -m tests.support.services`: the servers the tests need, in the foreground until interrupted.

The URL goes to stdout, as data for a script; everything for people goes to stderr.
"""

from __future__ import annotations

import signal
import sys

from strata.base.errors import StrataError
from tests.support.postgres import PostgresServer

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def main() -> int:
    try:
        with PostgresServer() as server:
            # Blocked from here on, a signal waits for sigwait. One that came before ended us; the server cannot stay.
            signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
            print(server.server_url, flush=True)
            print(_help(server), file=sys.stderr, flush=True)
            signal.sigwait(_STOP_SIGNALS)
    except StrataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _help(server: PostgresServer) -> str:
    return (
        "PostgreSQL is running until Ctrl-C; its data is removed then.\n"
        f"Its log: {server.log_path}\n"
        "To run the tests against it instead of a server of their own:\n"
        f"  export STRATA_TEST_POSTGRES={server.server_url}"
    )


if __name__ == "__main__":
    sys.exit(main())
