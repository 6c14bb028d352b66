"""Installs Strata into /opt/strata, for the images: `python scripts/install_locked.py EXTRAS [PACKAGE==VERSION ...]`.

pip resolves the extras of the wheel in `dist` within the versions of constraints.txt and downloads their packages. Each
is compared with the hashes of that file before any is installed. PACKAGEs are named apart, because the index chooses
their build (decision 0007): what is not in constraints.txt is installed only with them.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

TARGET: Final = "/opt/strata"
_PIN: Final = re.compile(r"(?m)^([A-Za-z0-9._-]+)==.*?(?= ?\\?$)")
_HASH: Final = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def refuse_unlocked(files: list[Path], locked: str, *, apart: bool) -> None:
    """Ends the program if a file is not one of the lock. With `apart` a name that the lock has not is let through."""
    hashes = set(_HASH.findall(locked))
    names = {_spell(match[1]) for match in _PIN.finditer(locked)}
    for file in files:
        known = hashlib.sha256(file.read_bytes()).hexdigest() in hashes
        if not known and (not apart or _spell(file.name.split("-")[0]) in names):
            sys.exit(f"{file.name} has none of the hashes in constraints.txt")


def pip(*arguments: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments], check=True)


def main(extras: str, *apart: str) -> None:
    locked = Path("constraints.txt").read_text("utf-8")
    (wheel,) = Path("dist").glob("*.whl")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pins = folder / "pins.txt"
        pins.write_text("\n".join(match[0] for match in _PIN.finditer(locked)), "utf-8")
        wanted = f"{wheel}[{extras}]"
        pip("download", "--no-cache-dir", "--only-binary=:all:", "-c", pins, "-d", folder, wanted, *apart)
        files = sorted(folder.glob("*.whl"))
        refuse_unlocked([file for file in files if file.name != wheel.name], locked, apart=bool(apart))
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", TARGET], check=True)
        pip("--python", TARGET, "install", "--no-cache-dir", "--no-index", "--no-deps", *files)
        pip("--python", TARGET, "check")


def _spell(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main(*sys.argv[1:])
