"""`python -m strata.train.runner.single_node --settings FILE`: torchrun with all ranks here, listening nowhere.

The rendezvous that torchrun brings is a TCP server on all interfaces, which takes from anybody what torchrun then
unpickles. One machine needs no server: torchrun keeps its notes in its own memory, and the ranks meet through a file in
the folder of the sockets, which is its owner's alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from torch.distributed import HashStore, run  # type: ignore[attr-defined]  # documented, and not in __all__
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from strata.train.settings import load_settings

HERE: Final = "strata-here"
"""The name of the rendezvous and of its run, by which a rank knows that it was started so."""


class _Here(RendezvousHandler):
    """One node, which is all of them."""

    def get_backend(self) -> str:
        return HERE

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", 0))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return HERE

    def shutdown(self) -> bool:
        return True


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m strata.train.runner.single_node", description="All ranks of one machine."
    )
    parser.add_argument("--settings", type=Path, required=True, metavar="FILE", help="The server's settings, TOML.")
    file: Path = parser.parse_args().settings
    settings = load_settings(file)
    # What an earlier group wrote there would be taken for a word of this one.
    settings.meeting_place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    settings.meeting_place.unlink(missing_ok=True)
    rendezvous_handler_registry.register(HERE, lambda _: _Here())
    run.main(
        [
            *("--nnodes=1", f"--nproc-per-node={settings.ranks.nproc}", "--max-restarts=0"),
            *(f"--rdzv-backend={HERE}", f"--rdzv-id={HERE}", "--local-addr=127.0.0.1"),
            *("-m", "strata.train.runner", "--settings", str(file)),
        ]
    )


if __name__ == "__main__":
    main()
