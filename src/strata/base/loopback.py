"""Which addresses stay on this machine: what may be served, or a secret sent, without encryption."""

from __future__ import annotations

import ipaddress


def is_loopback_host(host: str) -> bool:
    """A name or an address, without brackets. A name other than `localhost` may be anywhere."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
