"""Which extra brings a package that is not installed, and the one line that tells the reader so."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from strata.base.errors import Code, StrataError

DISTRIBUTION: Final = "strata-train"

DISTRIBUTION_OF: Final[Mapping[str, str]] = {
    "backports": "backports-zstd",
    "cryptography": "cryptography",
    "google": "protobuf",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "httpx": "httpx",
    "numpy": "numpy",
    "obstore": "obstore",
    "prometheus_client": "prometheus-client",
    "psutil": "psutil",
    "psycopg": "psycopg",
    "pyarrow": "pyarrow",
    "safetensors": "safetensors",
    "starlette": "starlette",
    "tokenizers": "tokenizers",
    "torch": "torch",
    "transformers": "transformers",
    "uvicorn": "uvicorn",
    "uvloop": "uvloop",
    "zmq": "pyzmq",
}
"""Import name to distribution. A package that is absent cannot say which distribution it came from; a test compares
this table with the extras of the project."""

_REQUIREMENT: Final = re.compile(r"^(?P<name>[A-Za-z0-9._-]+).*\bextra\s*==\s*['\"](?P<extra>[\w-]+)['\"]")


def require(module: str, *, extra: str) -> None:
    """Refuse with the line to run when `module` cannot be imported. For a package that several extras bring."""
    from importlib.util import find_spec

    if find_spec(module) is None:
        raise missing(DISTRIBUTION_OF.get(module, module), extra)


def missing(distribution: str, extra: str) -> StrataError:
    return StrataError(
        Code.UNSUPPORTED,
        f"this command needs {distribution}, which is not installed: pip install '{DISTRIBUTION}[{extra}]'",
    )


def explain(error: ModuleNotFoundError) -> StrataError | None:
    """The refusal for an import that failed, or None when no extra brings that module."""
    distribution = DISTRIBUTION_OF.get((error.name or "").partition(".")[0])
    extra = None if distribution is None else extras_by_distribution().get(distribution)
    return None if distribution is None or extra is None else missing(distribution, extra)


def extras_by_distribution() -> dict[str, str]:
    """From the installed metadata: each optional distribution and the extra that brings it (the first of several)."""
    from importlib.metadata import requires

    found: dict[str, str] = {}
    for requirement in requires(DISTRIBUTION) or []:
        match = _REQUIREMENT.match(requirement)
        if match and match["extra"] not in ("all", "dev"):
            name = match["name"].lower().replace("_", "-")
            found[name] = min(match["extra"], found.get(name, match["extra"]))
    return found
