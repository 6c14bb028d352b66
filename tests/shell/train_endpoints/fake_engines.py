"""Settings for a server that starts the fake of vLLM."""

from __future__ import annotations

from pathlib import Path


def engine_settings(package: Path, *more: str) -> str:
    """`package` is a folder in which `vllm` is the fake."""
    lines = ("[inference]", 'engine = "vllm"', f'environment = {{PYTHONPATH = "{package}"}}', *more, "")
    return "\n".join(lines)
