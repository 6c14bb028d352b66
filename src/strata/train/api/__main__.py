"""`python -m strata.train.api --settings FILE`: the API server as a process of its own, for the launcher."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from strata.base import log
from strata.base.errors import StrataError
from strata.train.api.server import run
from strata.train.settings import load_settings


def main(arguments: Sequence[str]) -> int:
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
        run(settings, lambda line: _announce(line, options.ready_fd), number=options.number, port=options.port)
    except StrataError as error:
        _say(str(error))
        return 2
    return 0


def _announce(line: str, ready_fd: int | None) -> None:
    _say(line)
    if ready_fd is not None:
        os.write(ready_fd, f"ready {line.rpartition(' ')[2]}\n".encode())


def _say(line: str) -> None:
    sys.stderr.write(f"strata: {line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
