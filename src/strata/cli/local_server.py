"""A training server as a child process of one command: its start timeout (900 s), waiting, stop (60 s), and use of one
that runs already.

It ends with the command, however that ends. Its journal and checkpoints stay, so that the next server with the same
settings continues from there: that of a command, or `strata serve`. One of `strata serve` that runs already is used.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from strata.base.errors import Code, StrataError
from strata.base.file_lock import is_locked, lock_folder
from strata.base.parent import TIED_COMMAND
from strata.base.private import private_folder
from strata.base.settings import process_environment
from strata.base.unix_socket import SCHEME, is_listening

if TYPE_CHECKING:
    from strata.train.settings import ServerSettings

OWN_COMMAND: Final = (sys.executable, "-c", "from strata.cli.main import main; main()")
START_S: Final = 900.0
STOP_S: Final = 60.0
LOOK_S: Final = 0.1
COMMAND_LOCK: Final = "command.lock"
"""A lock in the data folder: held by the command for which its server runs."""
ANNOUNCED: Final = b"strata serve: unix:"
NO_PORT: Final = {"STRATA_SERVER_LISTEN": "unix", "STRATA_SERVER_API_SERVERS": "1"}
"""Variables, and not in the settings file: `strata serve` with the same file has a port."""
_SHOWN: Final = 5
"""Last lines of its log, when it does not start."""


def run_own_command(*arguments: str) -> None:
    """Another command of this program in a process of its own, for what needs torch."""
    done = subprocess.run([*OWN_COMMAND, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise StrataError(Code.INVALID, done.stderr.strip().removeprefix("strata: "))


@contextmanager
def local_server(
    config: Path, environment: Mapping[str, str], log_file: Path, wait: Callable[[str], None]
) -> Iterator[ServerSettings]:
    """The server with this settings file, from when it serves until the block ends. `wait` is called until then."""
    from strata.train.settings import LAUNCHER_LOCK, load_settings

    settings = load_settings(config, environ=environment)
    began_s = time.monotonic()
    with ExitStack() as stack:
        # That a process listens is not enough: it may be what a server that was killed has left.
        while is_locked(settings.data / LAUNCHER_LOCK) or not _take(settings, stack):
            if is_listening(settings.api_socket) and not _ends_with_command(settings):
                yield settings
                return
            # It starts, or it stops, or it is about to end with its command.
            _pause(began_s, wait, f"another command may use the server in {settings.data}")
        stack.enter_context(_started(config, environment, log_file, wait))
        yield settings


def _take(settings: ServerSettings, stack: ExitStack) -> bool:
    """Says whether this command may start the server, until the stack ends: of several, one does."""
    private_folder(settings.data)
    try:
        stack.enter_context(lock_folder(settings.data, COMMAND_LOCK, taken="another command starts it", hint=""))
    except StrataError:
        return False
    return True


@contextmanager
def _started(
    config: Path, environment: Mapping[str, str], log_file: Path, wait: Callable[[str], None]
) -> Iterator[None]:
    with log_file.open("wb") as log:
        server = subprocess.Popen(
            [*TIED_COMMAND, *OWN_COMMAND, "serve", "run", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**environment, **NO_PORT},
            # Ctrl-C is for the command, which stops the server then.
            start_new_session=True,
        )
    try:
        _await_ready(server, log_file, wait)
        yield
    finally:
        server.terminate()
        try:
            server.wait(STOP_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _ends_with_command(settings: ServerSettings) -> bool:
    """Says whether the server that listens is one of this module: its command lives, or it has no port, although its
    settings have one."""
    from strata.train.settings import ADDRESS_FILE

    if is_locked(settings.data / COMMAND_LOCK):
        return True
    try:
        address = (settings.data / ADDRESS_FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        return True
    return settings.server.listen == "tcp" and address.startswith(SCHEME)


def without_server_settings() -> Mapping[str, str]:
    """The environment for a server of whose settings file no variable may change anything."""
    from strata.train.settings import ServerSettings

    prefixes = tuple(f"STRATA_{section.upper()}_" for section in ServerSettings.__struct_fields__)
    return {name: value for name, value in process_environment().items() if not name.startswith(prefixes)}


def _await_ready(server: subprocess.Popen[bytes], log_file: Path, wait: Callable[[str], None]) -> None:
    """Wait until the launcher announces the address. That a process listens proves nothing: it may be what an earlier
    server, which was killed, has left."""
    began_s = time.monotonic()
    while ANNOUNCED not in log_file.read_bytes():
        if server.poll() is not None:
            raise StrataError(Code.UNAVAILABLE, f"the training server did not start: {_reason(log_file)}")
        _pause(began_s, wait, f"see {log_file}")


def _pause(began_s: float, wait: Callable[[str], None], hint: str) -> None:
    waited_s = time.monotonic() - began_s
    if waited_s > START_S:
        raise StrataError(Code.DEADLINE, f"the training server is not ready after {START_S:g} s", hint=hint)
    wait(f"{waited_s:.0f} s")
    time.sleep(LOOK_S)


def _reason(log_file: Path) -> str:
    lines = log_file.read_text(encoding="utf-8", errors="replace").splitlines()
    reasons = [line.removeprefix("strata: ") for line in lines if line.startswith(("strata: ", "hint: "))]
    return "\n".join(reasons or [*lines[-_SHOWN:], f"(in {log_file})"])
