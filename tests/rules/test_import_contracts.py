"""Every import contract can fail: a planted violation makes the linter fail and name that contract."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import pytest

ROOT: Final = Path(__file__).parents[2]


class Plant(NamedTuple):
    contract: str
    path: str
    """Where in `src/strata` the line goes; packages on the way are created, files that exist are appended to."""
    line: str
    also: tuple[str, ...] = ()
    """Modules that the line needs to exist."""


PLANTS: Final = (
    Plant("layers", "base/plant.py", "import strata.journal.port"),
    Plant("layers", "journal/port.py", "import strata.cli.main"),
    Plant("layers", "fleet/service/jobs.py", "import strata.coord.server.service", also=("coord/server/service.py",)),
    Plant("layers", "identity/keys.py", "import strata.journal.port"),
    Plant("layers", "journal/port.py", "import strata.identity", also=("identity/__init__.py",)),
    Plant("layers", "http/plant.py", "import strata.train.service", also=("train/service.py",)),
    Plant("layers", "identity/keys.py", "import strata.http.root"),
    Plant("product", "cli/plant.py", "import tests.support.world"),
    Plant("layers", "utils/text.py", ""),
    Plant("inside-a-layer", "coord/core/state.py", "import strata.coord.server.wire", also=("coord/server/wire.py",)),
    Plant("inside-a-layer", "coord/worker/link.py", "import strata.coord.server.service"),
    Plant("coordinator", "coord/server/service.py", "import strata.coord.server.servicer"),
    Plant("coordinator", "coord/server/plant.py", ""),
    Plant("inside-a-layer", "fleet/ports.py", "import strata.fleet.store.sqlite.store"),
    Plant("inside-a-layer", "train/wire.py", "import strata.train.runner", also=("train/runner/__init__.py",)),
    Plant("inside-a-layer", "train/orchestrator/plant.py", "import strata.train.runner"),
    Plant("inside-a-layer", "train/payload.py", "import strata.train.runner.checkpoint.export"),
    Plant("inside-a-layer", "train/checkpoints/plant.py", "import strata.train.link"),
    Plant("inside-a-layer", "train/endpoints/plant.py", "import strata.train.api"),
    Plant("inside-a-layer", "train/core/state.py", "import strata.train.status.views"),
    Plant("inside-a-layer", "train/plan/memory_plan.py", "import strata.train.wire.replies"),
    Plant("inside-a-layer", "train/status/views.py", "import strata.train.wire.replies"),
    Plant("fleet-shells", "fleet/agent/plant.py", "import strata.fleet.store.rows"),
    Plant("fleet-shells", "fleet/store/plant.py", "import strata.fleet.http.routes"),
    Plant("agent", "sdk/datasets.py", "from strata.fleet.agent.environment_variables import job_environment"),
    Plant("agent", "cli/fleet/prepare.py", "def later() -> None:\n    import strata.fleet.agent.loop"),
    Plant("fleet-stores", "fleet/store/sqlite/plant.py", "import strata.fleet.store.postgres.tables"),
    Plant("fleet-stores", "fleet/store/rows.py", "import strata.fleet.store.sqlite.tables"),
    Plant("fleet-stores", "fleet/store/leases.py", "import strata.fleet.store.postgres.claims"),
    Plant("journal", "journal/sqlite.py", "import strata.journal.postgres", also=("journal/postgres.py",)),
    Plant("journal", "journal/port.py", "import strata.journal.sqlite", also=("journal/sqlite.py",)),
    Plant("journal", "journal/replica.py", "import strata.journal.sqlite", also=("journal/sqlite.py",)),
    Plant("torch", "train/orchestrator.py", "def later() -> None:\n    import torch.nn"),
    Plant("psycopg", "fleet/service/jobs.py", "import psycopg"),
    Plant("psycopg", "hub/compose.py", "from psycopg import AsyncConnection"),
    Plant("grpc", "coord/server/service.py", "import grpc"),
    Plant("grpc", "journal/port.py", "from google.protobuf import message"),
    Plant("gateway", "hub/gateway/servers.py", "from strata.train.wire.tinker import read_pass"),
    Plant("gateway", "hub/gateway/plant.py", "def later() -> None:\n    import numpy"),
    Plant("layers", "fleet/http/plant.py", "import strata.train.wire.replies"),
    Plant("base", "base/plant.py", "import rich.console"),
    Plant("base", "base/plant.py", "import starlette"),
    Plant("base-install", "sdk/__init__.py", "import starlette"),
    Plant("base-install", "fleet/agent/loop.py", "import uvicorn"),
    Plant("base-install", "sdk/fleet.py", "import strata.fleet.http\nimport fastapi", also=("fleet/http.py",)),
    Plant("cli", "cli/plant.py", "def later() -> None:\n    import cryptography"),
)

ALLOWED: Final = (
    Plant("torch", "train/runner/model/base.py", "import torch"),
    Plant("psycopg", "fleet/store/postgres/store.py", "import psycopg"),
    Plant("grpc", "coord/server/servicer.py", "import grpc.aio"),
    Plant("grpc", "coord/pb/coordinator_pb2.py", "from google.protobuf import descriptor"),
    Plant("grpc", "hub/compose.py", "import grpc"),
    Plant("agent", "cli/fleet/enrol.py", "import strata.fleet.agent.loop"),
    Plant("cli", "cli/plant.py", "import strata.hub.compose", also=("hub/compose.py",)),
)


def contracts() -> dict[str, str]:
    """Id and name of every contract in the project's configuration."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return {contract["id"]: contract["name"] for contract in config["tool"]["importlinter"]["contracts"]}


@pytest.fixture(scope="module")
def planted_report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of the linter, on a tree with all violations: each is found beside the others."""
    done = lint(planted_tree(tmp_path_factory.mktemp("planted"), PLANTS))
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def planted_tree(folder: Path, plants: Sequence[Plant]) -> Path:
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    for each in plants:
        for module in each.also:
            write(folder, module, "")
        write(folder, each.path, each.line)
    return folder


def write(tree: Path, path: str, line: str) -> None:
    file = tree / "src" / "strata" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    for package in file.relative_to(tree / "src").parents[:-1]:
        (tree / "src" / package / "__init__.py").touch()
    with file.open("a", encoding="utf-8") as text:
        text.write(f"\n{line}\n")


def lint(tree: Path) -> subprocess.CompletedProcess[str]:
    # The copy comes first on the path, so the linter reads it and not the installed package.
    environment = {
        "PYTHONPATH": str(tree / "src"),
        "PATH": os.defpath,
        "COLUMNS": "200",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    linter = Path(sys.executable).with_name("lint-imports")
    return subprocess.run(
        [str(linter), "--no-cache", "--no-logo"],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def section(report: str, contract: str) -> str:
    """What the linter says of a broken contract."""
    name = contracts()[contract]
    _, found, after = report.partition(f"\n{name}\n{'-' * len(name)}\n")
    assert found, report
    return re.split(r"\n\S[^\n]*\n-{20,}\n", after)[0]


@pytest.mark.parametrize("planted", PLANTS, ids=lambda p: f"{p.contract}-{p.path}")
def test_a_planted_import_breaks_its_contract(planted_report: str, planted: Plant) -> None:
    found = section(planted_report, planted.contract)
    module = "strata." + planted.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    if not planted.line:
        # A module that no layer names; the linter lists the child of the container.
        assert any(f"- {name}\n" in found for name in (module, module.rpartition(".")[0])), found
        return
    names = re.findall(r"(?:import|from) ([\w.]+)", planted.line)
    imported = "|".join(re.escape(name if name.startswith("strata.") else name.split(".")[0]) for name in names)
    assert re.search(rf"{re.escape(module)} (?:\(l\.\d+\) )?-> (?:{imported})\b", found), found


def test_imports_that_the_design_allows_keep_the_contracts(tmp_path: Path) -> None:
    done = lint(planted_tree(tmp_path, ALLOWED))
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"{name} KEPT" in done.stdout for name in contracts().values()), done.stdout


def test_every_contract_has_a_planted_violation() -> None:
    assert contracts().keys() == {planted.contract for planted in PLANTS}
