"""`python -m strata.train.api --settings FILE`: the API server as a process of its own, for the launcher."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from strata.base import log
from strata.base.errors import StrataError
from strata.train.api.server import MakePages, run
from strata.train.settings import load_settings


def main(arguments: Sequence[str], pages: MakePages | None = None) -> int:
    """`pages` are for browsers, beside the API."""
    parser = argparse.ArgumentParser(prog="python -m strata.train.api", description=__doc__)
    parser.add_argument("--settings", type=Path, required=True, help="the server's TOML file")
    parser.add_argument(
        "--ready-fd", type=int, help="write a line with the server's address to this pipe when it listens"
    )
    parser.add_argument("--number", type=int, default=0, help="which of several API servers this is")
    parser.add_argument("--port", type=int, help="instead of the one in the settings")
    options = parser.parse_args(arguments)
    try:
        settings = load_settings(options.settings)
        style = settings.server.log_format or ("console" if sys.stderr.isatty() else "json")
        log.configure(style, settings.server.log_level)
        run(
            settings,
            lambda address: _announce(address, options.ready_fd),
            number=options.number,
            port=options.port,
            # A hub in front has a dashboard for all of its servers.
            pages=pages if settings.server.front_key is None else None,
        )
    except StrataError as error:
        _say(str(error))
        return 2
    return 0


def _announce(address: str, ready_fd: int | None) -> None:
    _say(f"listening on {address}")
    if ready_fd is not None:
        os.write(ready_fd, f"ready {address}\n".encode())


def _say(line: str) -> None:
    sys.stderr.write(f"strata: {line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
