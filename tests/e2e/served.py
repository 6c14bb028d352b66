"""A server as its documents start it, until the tests that use it are done."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

TRAINING_SERVER: Final = "strata serve: http"


@contextmanager
def served(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], ready: str = TRAINING_SERVER
) -> Iterator[None]:
    """Returns when it has printed a line with `ready`."""
    with subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            printed = []
            for line in server.stderr:
                printed.append(line)
                if ready in line:
                    break
            else:
                raise AssertionError(f"the server did not start: {''.join(printed)}")
            # A pipe that nobody reads fills up, and whoever writes to it stops.
            reading = threading.Thread(target=server.stderr.read)
            reading.start()
            yield
            server.send_signal(signal.SIGTERM)
            reading.join(60)
        except BaseException:
            # Else the test would wait for it instead of failing.
            server.kill()
            raise
