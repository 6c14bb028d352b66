"""`python -m strata.train.runner.single_node --settings FILE`: torchrun with all ranks here, listening nowhere.

torchrun's own rendezvous is a TCP server on all interfaces, which unpickles what any client sends. A single node needs
no server: torchrun keeps its store in its own memory, and the ranks rendezvous through a file in the folder of the
sockets, which only its owner can access.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from torch.distributed import HashStore, run  # type: ignore[attr-defined]  # documented, and not in __all__
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from strata.train.runner.collectives import SINGLE_NODE
from strata.train.settings import load_settings


class _SingleNode(RendezvousHandler):
    """A rendezvous of one node, which never waits for others."""

    def get_backend(self) -> str:
        return SINGLE_NODE

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", 0))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return SINGLE_NODE

    def shutdown(self) -> bool:
        return True


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m strata.train.runner.single_node", description="All ranks of one machine."
    )
    parser.add_argument("--settings", type=Path, required=True, metavar="FILE", help="The server's settings, TOML.")
    file: Path = parser.parse_args().settings
    settings = load_settings(file)
    # The file of an earlier group would be mistaken for this one's.
    settings.rendezvous_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    settings.rendezvous_file.unlink(missing_ok=True)
    rendezvous_handler_registry.register(SINGLE_NODE, lambda _: _SingleNode())
    run.main(
        [
            *("--nnodes=1", f"--nproc-per-node={settings.ranks.nproc}", "--max-restarts=0"),
            *(f"--rdzv-backend={SINGLE_NODE}", f"--rdzv-id={SINGLE_NODE}", "--local-addr=127.0.0.1"),
            *("-m", "strata.train.runner", "--settings", str(file)),
        ]
    )


if __name__ == "__main__":
    main()
