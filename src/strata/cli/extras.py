"""Finds the extra (`pip install 'strata-train[…]'`) that provides a missing package, and words the error."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from strata.base.errors import Code, StrataError

DISTRIBUTION: Final = "strata-train"

COMPOSED: Final = ("all", "demo", "dev")
"""Extras that are made of others: a missing package is explained by the one that is about it."""
IRREGULAR: Final[Mapping[str, str]] = {
    "PIL": "pillow",
    "backports": "backports-zstd",
    "google": "protobuf",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "markdown_it": "markdown-it-py",
    "opentelemetry.exporter": "opentelemetry-exporter-otlp-proto-http",
    "opentelemetry.sdk": "opentelemetry-sdk",
    "yaml": "pyyaml",
    "zmq": "pyzmq",
}
"""Import name to distribution, where they differ by more than case and underscores. A package that is absent cannot say
which distribution it came from; a test compares this table with the extras of the project."""

_REQUIREMENT: Final = re.compile(r"^(?P<name>[A-Za-z0-9._-]+).*\bextra\s*==\s*['\"](?P<extra>[\w-]+)['\"]")


def require(module: str, *, extra: str) -> None:
    """UNSUPPORTED with the command to run if `module` cannot be imported. For a package that several extras provide."""
    from importlib.util import find_spec

    if find_spec(module) is None:
        raise missing_extra(distribution_of(module), extra)


def missing_extra(distribution: str, extra: str) -> StrataError:
    return StrataError(
        Code.UNSUPPORTED,
        f"this command needs {distribution}, which is not installed: pip install '{DISTRIBUTION}[{extra}]'",
    )


def explain_missing_module(error: ModuleNotFoundError) -> StrataError | None:
    """The error for a failed import, or None if no extra provides that module."""
    distribution = distribution_of(error.name or "")
    extra = extras_by_distribution().get(distribution)
    return None if extra is None else missing_extra(distribution, extra)


def distribution_of(module: str) -> str:
    name = module.split(".")
    # Several distributions share the first part of their names.
    regular = name[0].lower().replace("_", "-")
    return IRREGULAR.get(".".join(name[:2])) or IRREGULAR.get(name[0], regular)


def extras_by_distribution() -> dict[str, str]:
    """Reads the installed metadata: each optional distribution and the extra that provides it (the first of
    several)."""
    from importlib.metadata import requires

    extras: dict[str, str] = {}
    for requirement in requires(DISTRIBUTION) or []:
        match = _REQUIREMENT.match(requirement)
        if match and match["extra"] not in COMPOSED:
            name = match["name"].lower().replace("_", "-")
            extras[name] = min(match["extra"], extras.get(name, match["extra"]))
    return extras
