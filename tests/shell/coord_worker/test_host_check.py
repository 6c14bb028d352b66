"""The check of hosts with real measurements, and what a rendezvous makes of its verdict."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters

from strata.coord.worker import torch_host_check
from strata.coord.worker.torch_host_check import HostRound
from strata.coord.worker.torch_rendezvous import StrataRendezvous
from tests.shell.coord.running import in_process
from tests.shell.coord_worker.test_rendezvous import environment

__all__ = ["environment"]

HOST = """
import json, sys
from torch._C._distributed_c10d import PrefixStore, TCPStore
from strata.coord.worker.torch_host_check import HostRound, check_hosts
port, rank, size = map(int, sys.argv[1:])
store = PrefixStore("round", TCPStore("127.0.0.1", port))
found = HostRound(store, ("127.0.0.1", port), "round", rank, size, lambda: False)
print(json.dumps(check_hosts(found, 3.0)))
"""
FAULTS = {
    "": None,
    "its matrix product is wrong on cpu": "torch.mm = lambda *factors, mm=torch.mm: mm(*factors) + 1",
    "its matrix product takes ": "torch.mm = lambda *factors, mm=torch.mm: [mm(*factors) for _ in range(30)][0]",
    "its check ended with status 7": f"import os; os._exit(7) if {torch_host_check.__name__!r} in sys.orig_argv else 0",
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("reason", FAULTS)
async def test_all_hosts_name_the_broken_one(tmp_path: Path, reason: str) -> None:
    """The fault is in the torch of one host, not in what is tested."""
    fault = FAULTS[reason]
    if fault is not None:
        (tmp_path / "sitecustomize.py").write_text(f"import sys, torch\n{fault}\n", encoding="utf-8")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {"PATH": os.defpath, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    hosts = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", HOST, str(store.port), str(rank), "3"),
            env=variables if rank != 1 or fault is None else {**variables, "PYTHONPATH": str(tmp_path)},
            stdout=asyncio.subprocess.PIPE,
        )
        for rank in range(3)
    ]
    try:
        verdicts = [json.loads((await host.communicate())[0].splitlines()[-1]) for host in hosts]
    finally:
        for host in hosts:
            if host.returncode is None:
                host.kill()
    print(verdicts)
    assert all(each == verdicts[0] for each in verdicts)
    assert list(verdicts[0]) == ([] if fault is None else ["1"])
    assert all(each.startswith(reason) for each in verdicts[0].values())


def node(address: str, ip: str, folder: Path) -> StrataRendezvous:
    files = {name: quote(str(folder / f"{ip} {name}")) for name in ("failure_file", "refusal_file")}
    configuration: dict[str, Any] = {"last_call_timeout": "0", "check_hosts": "2", "join_timeout": "60", **files}
    return StrataRendezvous(RendezvousParameters("strata", address, "gang", 1, 2, ip, **configuration))


async def test_an_excluded_host_leaves_with_the_reason_and_the_others_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verdict(found: HostRound, factor: float) -> dict[int, str]:
        assert factor == 2.0
        return {found.size - 1: "it is slow"} if found.size > 1 else {}

    monkeypatch.setattr(torch_host_check, "check_hosts", verdict)
    async with in_process() as running:
        nodes = [await asyncio.to_thread(node, running.address, f"127.0.0.{n}", tmp_path) for n in (1, 2)]
        first = asyncio.create_task(asyncio.to_thread(nodes[0].next_rendezvous))
        async with asyncio.timeout(60):
            info = await first
            assert (info.rank, info.world_size) == (0, 1)
            again = asyncio.create_task(asyncio.to_thread(_next_round, nodes[0]))
            with pytest.raises(RendezvousConnectionError, match="this host, was excluded: it is slow"):
                await asyncio.to_thread(nodes[1].next_rendezvous)
            await asyncio.to_thread(nodes[1].shutdown)
            info = await again
        assert (info.rank, info.world_size) == (0, 1)
        await asyncio.to_thread(nodes[0].shutdown)
    assert "(127.0.0.2), this host, was excluded" in (tmp_path / "127.0.0.2 refusal_file").read_text("utf-8")
    assert [each.name for each in tmp_path.iterdir()] == ["127.0.0.2 refusal_file"], "no failure that may pass"


def _next_round(found: StrataRendezvous) -> Any:
    """As torchrun does it, once others have come."""
    while not found.num_nodes_waiting():
        time.sleep(0.05)
    return found.next_rendezvous()


def test_a_factor_that_would_exclude_every_host_is_refused() -> None:
    parameters = RendezvousParameters("strata", "127.0.0.1:9", "gang", 1, 2, "127.0.0.1", check_hosts="0.5")
    with pytest.raises(Exception, match=re.escape("above 1, not 0.5")):
        StrataRendezvous(parameters)
