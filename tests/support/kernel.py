"""What the kernel lets this process do. A sandbox may keep even root from some of it; a missing program is an error."""

from __future__ import annotations

import subprocess
from typing import Final

_NETWORK: Final = "ip link add name left type veth peer name right && ip link add name middle type bridge"
_OVERLAY: Final = """
mount -t tmpfs tmpfs /mnt && mkdir /mnt/upper /mnt/work &&
mount -t overlay overlay -o lowerdir=/etc,upperdir=/mnt/upper,workdir=/mnt/work /etc
"""


def lets_make_networks() -> bool:
    return _lets("--net", _NETWORK)


def lets_make_overlays() -> bool:
    return _lets("--propagation=private", _OVERLAY)


def _lets(option: str, script: str) -> bool:
    """In a namespace that is gone afterwards."""
    tried = subprocess.run(["unshare", "--mount", option, "sh", "-c", script], capture_output=True, check=False)
    return tried.returncode == 0
