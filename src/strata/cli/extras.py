"""Knows which extra provides a package that is not installed, and words the error that names it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from strata.base.errors import Code, StrataError

DISTRIBUTION: Final = "strata-train"

DISTRIBUTION_OF: Final[Mapping[str, str]] = {
    "accelerate": "accelerate",
    "apprise": "apprise",
    "backports": "backports-zstd",
    "bitsandbytes": "bitsandbytes",
    "cmaes": "cmaes",
    "cryptography": "cryptography",
    "google": "protobuf",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "httpx": "httpx",
    "huggingface_hub": "huggingface-hub",
    "indexed_gzip": "indexed-gzip",
    "jinja2": "jinja2",
    "numpy": "numpy",
    "obstore": "obstore",
    "opentelemetry.exporter": "opentelemetry-exporter-otlp-proto-http",
    "opentelemetry.sdk": "opentelemetry-sdk",
    "optuna": "optuna",
    "prometheus_client": "prometheus-client",
    "psutil": "psutil",
    "psycopg": "psycopg",
    "pyarrow": "pyarrow",
    "safetensors": "safetensors",
    "starlette": "starlette",
    "tensorboardX": "tensorboardx",
    "tokenizers": "tokenizers",
    "torch": "torch",
    "transformers": "transformers",
    "uv": "uv",
    "uvicorn": "uvicorn",
    "uvloop": "uvloop",
    "wandb": "wandb",
    "yaml": "pyyaml",
    "zmq": "pyzmq",
}
"""Import name to distribution. A package that is absent cannot say which distribution it came from; a test compares
this table with the extras of the project."""

_REQUIREMENT: Final = re.compile(r"^(?P<name>[A-Za-z0-9._-]+).*\bextra\s*==\s*['\"](?P<extra>[\w-]+)['\"]")


def require(module: str, *, extra: str) -> None:
    """UNSUPPORTED with the command to run if `module` cannot be imported. For a package that several extras provide."""
    from importlib.util import find_spec

    if find_spec(module) is None:
        raise missing_extra(DISTRIBUTION_OF.get(module, module), extra)


def missing_extra(distribution: str, extra: str) -> StrataError:
    return StrataError(
        Code.UNSUPPORTED,
        f"this command needs {distribution}, which is not installed: pip install '{DISTRIBUTION}[{extra}]'",
    )


def explain_missing_module(error: ModuleNotFoundError) -> StrataError | None:
    """The error for a failed import, or None if no extra provides that module."""
    name = (error.name or "").split(".")
    # Several distributions share the first part of their names.
    distribution = DISTRIBUTION_OF.get(".".join(name[:2])) or DISTRIBUTION_OF.get(name[0])
    extra = None if distribution is None else extras_by_distribution().get(distribution)
    return None if distribution is None or extra is None else missing_extra(distribution, extra)


def extras_by_distribution() -> dict[str, str]:
    """Reads the installed metadata: each optional distribution and the extra that provides it (the first of
    several)."""
    from importlib.metadata import requires

    extras: dict[str, str] = {}
    for requirement in requires(DISTRIBUTION) or []:
        match = _REQUIREMENT.match(requirement)
        if match and match["extra"] not in ("all", "dev"):
            name = match["name"].lower().replace("_", "-")
            extras[name] = min(match["extra"], extras.get(name, match["extra"]))
    return extras
