"""Environments with packages of others, kept in the user's cache: what must not share ours."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def cached_venv(name: str, packages: Sequence[str], unwanted: Sequence[str] = (), *, bare: Sequence[str] = ()) -> Path:
    """The folder with the programs of a venv that has these packages, and those in `bare` without what they require."""
    folder = Path("~/.cache/strata-tests").expanduser() / name
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True, timeout=600)
        pip = [str(folder / "bin" / "python"), "-m", "pip"]
        done = subprocess.run(
            [*pip, "install", "--quiet", *packages], check=False, timeout=1500, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-300:]
        if bare:
            subprocess.run([*pip, "install", "--quiet", "--no-deps", *bare], check=True, timeout=300)
        if unwanted:
            subprocess.run([*pip, "uninstall", "--quiet", "-y", *unwanted], check=True, timeout=300)
        (folder / "complete").touch()
    return folder / "bin"
