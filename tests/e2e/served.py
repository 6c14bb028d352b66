"""A training server as its documents start it, until the tests that use it are done."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def served(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """Returns when it has said that it serves."""
    with subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        for line in server.stderr:
            if line.startswith("strata serve: http"):
                break
        # A pipe that nobody reads fills up, and whoever writes to it stops.
        reading = threading.Thread(target=server.stderr.read)
        reading.start()
        yield
        server.send_signal(signal.SIGTERM)
        reading.join(60)
