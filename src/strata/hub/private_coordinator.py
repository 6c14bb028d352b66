"""The coordinator of gangs that a hub on loopback starts for itself: its folder, and its port and token secret, which
stay the same over restarts.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

from msgspec.structs import replace

from strata.base.atomic import create_file, write_file
from strata.base.private import private_folder, require_private_folder
from strata.base.secret import read_secret
from strata.coord.private import PrivateCoordinator, reserve_port
from strata.hub.settings import GangCoordinatorSettings, HubSettings


@contextmanager
def private_coordinator(
    hub: HubSettings, command: Sequence[str], *, checkpoint_root: str
) -> Iterator[tuple[HubSettings, PrivateCoordinator | None]]:
    """A coordinator of gangs on loopback, and the settings that name it; none if they name one, or without the extra.

    Port and secret stay the same: members of gangs that outlive this process find it again.
    """
    if hub.coordinator is not None or find_spec("grpc") is None:
        yield hub, None
        return
    data = hub.data.expanduser()
    require_private_folder(data, "the hub's files")
    folder = private_folder(data / "coordinator")
    secret, port = folder / "token.secret", folder / "port"
    if not secret.exists():
        create_file(secret, secrets.token_hex(32).encode())
    saved = port.read_text(encoding="ascii") if port.exists() else ""
    try:
        guard = reserve_port(int(saved) if saved.isdecimal() else 0)
    except OSError:
        guard = reserve_port()
    with guard:
        number = guard.getsockname()[1]
        write_file(port, str(number).encode())
        address = f"127.0.0.1:{number}"
        settings = GangCoordinatorSettings(
            address=address, token_secret=read_secret(secret), checkpoint_root=checkpoint_root
        )
        coordinator = PrivateCoordinator(command=command, address=address, folder=folder, secret=secret)
        yield replace(hub, coordinator=settings), coordinator
