"""`python -m bench.switched COMMAND …`: a server as its command line starts it, whose metrics two signals switch.

After SIGUSR2 the calls of the Prometheus library do nothing; after SIGUSR1 they count again. So the same process, with
the same memory and the same connections, is measured with metrics and without.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any, Final

from prometheus_client import Counter, Gauge, Histogram

ON: Final = signal.SIGUSR1
OFF: Final = signal.SIGUSR2
_METHODS: Final = ((Counter, "inc"), (Gauge, "inc"), (Gauge, "dec"), (Gauge, "set"), (Histogram, "observe"))
_COUNTING: Final = {(kind, name): getattr(kind, name) for kind, name in _METHODS}


def do_nothing(*_: Any, **__: Any) -> None:
    pass


def switch(number: int, _: FrameType | None) -> None:
    for (kind, name), counting in _COUNTING.items():
        setattr(kind, name, counting if number == ON else do_nothing)


def main() -> None:
    from strata.cli.main import main as run

    for number in (ON, OFF):
        signal.signal(number, switch)
    run()


if __name__ == "__main__":
    main()
