"""Every bench and every campaign of the documents runs to its end in its shortest form."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from bench.__main__ import BENCHES
from bench.pages.cases import SIZE, pages
from soak.campaigns import REAL, SIMULATED

ROOT: Final = Path(__file__).parents[2]
PEERS: Final = {"dlrover", "peers"}
"""Benches beside other projects, whose packages have environments of their own."""
PAGES: Final = list(pages(SIZE))
CASES: Final = {
    "pages": [
        *(f"sqlite.{name}" for name in ["idle", *PAGES, "viewers"]),
        *(f"paint.{name}" for name in PAGES),
        *(f"postgres.{name}" for name in ["idle", *PAGES, "viewers"]),
        *(f"gang.{name}" for name in ("idle", "gangs", "gang", "gang.search")),
    ],
    "tenants": [
        "tenants.1",
        *(f"{beside}.{count}" for count in (2, 4, 8, 16) for beside in ("tenants", "slices")),
        "narrow.8",
        "snapshots",
    ],
}
"""All cases of the benches that measure several servers: one that skips a server or a case of it fails."""
POSTGRES_ALONE: Final = {"coordinator-partitions", "coordinator-scale"}
"""Campaigns of coordinators that share one database."""
FEW_WORKERS: Final = {"coordinator-herd": 1_000, "coordinator-scale": 400}
"""These are for as many workers as a whole machine carries, which no limit of a test allows."""

pytestmark = pytest.mark.timeout(1200)


def run(*command: str) -> str:
    process = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False, timeout=1150
    )
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
    return process.stdout


@pytest.mark.parametrize("name", sorted(BENCHES.keys() - PEERS))
def test_a_bench_ends_with_figures(name: str) -> None:
    rows = [json.loads(line) for line in run("bench", name, "--quick", "--json-only").splitlines()]
    assert rows
    assert all(row["bench"] == name and row["ours"] is not None for row in rows)
    assert name not in CASES or sorted(row["case"] for row in rows) == sorted(CASES[name])


@pytest.mark.parametrize("name", sorted(SIMULATED))
def test_a_simulated_campaign_has_no_violation(name: str) -> None:
    run("soak", name, "--seeds", "1", "--processes", "1", "--no-record")


@pytest.mark.parametrize("name", sorted(REAL))
def test_a_campaign_of_real_processes_has_no_violation(name: str) -> None:
    options = ["--on", "postgres"] if name in POSTGRES_ALONE else []
    options += ["--workers", str(FEW_WORKERS[name])] if name in FEW_WORKERS else []
    run("soak", name, "--kills", "1", "--no-record", *options)
