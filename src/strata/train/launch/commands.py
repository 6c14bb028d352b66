"""How each process of the server is started, and what it may see of the launcher's environment."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from strata.train.launch.child import EVENTS, Command
from strata.train.settings import ServerSettings

_SECRETS: Final = frozenset(
    {"STRATA_SERVER_OPERATOR_TOKEN", "STRATA_SERVER_DATABASE", "STRATA_SERVER_IDENTITY_DATABASE"}
)
"""Variables that may hold a password or a token: only a process that needs one gets it."""


def ranks(settings: ServerSettings, file: Path, environment: Mapping[str, str]) -> Command:
    """All ranks of this machine under torchrun. It does not restart them itself: the launcher starts all of it anew."""
    given = {
        "OMP_NUM_THREADS": str(settings.ranks.threads),
        # The model is a local folder or in the local cache: nothing is fetched while a server starts.
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if sys.platform == "linux":
        # One machine: what the ranks say to each other stays on it.
        given |= {"GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}
    arguments = (sys.executable, "-m", "strata.train.runner.local", "--settings", str(file))
    return Command("ranks", arguments, _without(environment, _SECRETS) | given)


def orchestrator(file: Path, holder: str, environment: Mapping[str, str]) -> Command:
    """Under the launcher's name: the next one need not wait for the lease of one that is known to be dead."""
    module = ("-m", "strata.train.orchestrator", "--settings", str(file))
    arguments = (sys.executable, *module, "--events-fd", EVENTS, "--holder", holder)
    return Command("orchestrator", arguments, _without(environment, _SECRETS - {"STRATA_SERVER_DATABASE"}))


def api_server(file: Path, environment: Mapping[str, str], number: int = 0, port: int | None = None) -> Command:
    arguments = [sys.executable, "-m", "strata.train.api", "--settings", str(file), "--ready-fd", EVENTS]
    arguments += ["--number", str(number)]
    if port is not None:
        arguments += ["--port", str(port)]
    name = f"API server {number}" if number else "API server"
    return Command(name, arguments, _without(environment, {"STRATA_SERVER_DATABASE"}))


def _without(environment: Mapping[str, str], names: frozenset[str] | set[str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in names}
