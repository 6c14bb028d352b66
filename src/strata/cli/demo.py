"""`strata demo`: starts `strata up` in a temporary folder, queues the demo's jobs, and prints the dashboard's link when
the hub's API shows each thing that the demo promises.

Nothing of the user's contexts, keys and settings is read or written: the processes get an environment without STRATA_
and OTEL_ variables, and with their own configuration and data folders.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from strata.base.errors import Code, StrataError
from strata.cli.extras import DISTRIBUTION
from strata.cli.output import print_error, write

if TYPE_CHECKING:
    from strata.demo.folder import DemoFolder
    from strata.fleet.client.hub_client import HubClient

EXTRA: Final = "demo"
MODULES: Final = ("uvicorn", "uvloop", "grpc", "psutil", "optuna")
"""One of each extra that the demo needs: hub, coordinator, worker, sweep."""
TRAIN_MODULES: Final = ("torch", "transformers", "zmq")
MANIFEST: Final = "manifest.toml"
MODEL: Final = "model"
SLOTS: Final = 8
READY_S: Final = 60.0
"""How long the hub may take to reply."""
WITHIN_S: Final = 600.0
"""How long the work may take on a slow machine."""
LOOK_S: Final = 0.5
_FIRST_LOOK_S: Final = 0.1
STOP_S: Final = 30.0
KEY: Final = "demo"
_SHOWN: Final = 8
"""Last lines of the log when the hub ends too early."""
_IGNORED: Final = ("STRATA_", "OTEL_")
_SETTINGS: Final = {
    # A folder in memory is smaller than a disk, and what a demo writes is small too.
    "STRATA_AGENT_MIN_FREE_GIB": "0.2",
    "STRATA_HUB_KEEP_FREE_BYTES": str(100 << 20),
    "STRATA_AGENT_GRACE_S": "2",
    "HF_HUB_OFFLINE": "1",
}


@click.command()
def demo() -> None:
    """Fill a dashboard with real work of this machine, then remove it all.

    It starts a hub, an agent and a coordinator on loopback, in a temporary folder, and runs small trainers: a search
    with pruned trials, a job that fails, a gang of two workers, a loss that falls, and with the extra 'train' a model
    that learns. It needs no network and changes no context, key or setting of yours. It prints a link when all of that
    is there. Ctrl-C ends it; a kill or a closed terminal leaves no process either.
    """
    from strata.base.settings import process_environment
    from strata.cli.extras import require

    if sys.platform != "linux":
        raise StrataError(Code.UNSUPPORTED, "strata demo runs on Linux only")
    for module in MODULES:
        require(module, extra=EXTRA)
    from strata.demo.folder import base_folders, open_folder, remove_abandoned

    began_s = time.monotonic()
    environ = process_environment()
    bases = base_folders(environ)
    for path in remove_abandoned(bases):
        print_error(f"strata demo: removed {path}, which a demo that was killed had left")
    if ignored := sorted(name for name in environ if name.startswith("STRATA_")):
        print_error(f"strata demo: these variables do not count here: {', '.join(ignored)}")
    folder = open_folder(bases)
    ready = False
    try:
        with _processes(folder, environ) as processes:
            link = _show(processes, began_s)
            ready = True
            write(link)
            processes.wait()
    except KeyboardInterrupt:
        if not ready:
            raise
    finally:
        shutil.rmtree(folder.path, ignore_errors=True)
        os.close(folder.lock)
    print_error("strata demo: ended, everything is removed")


class _Processes:
    """The processes of one demo, below a reaper that ends them when this process ends."""

    def __init__(self, folder: Path, environ: Mapping[str, str], reaper: subprocess.Popen[bytes]) -> None:
        self.folder = folder
        self.environ = environ
        self.log = folder / "demo.log"
        self._reaper = reaper

    def check(self) -> None:
        """UNAVAILABLE if the hub has ended."""
        if self._reaper.poll() is not None:
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines() if self.log.exists() else []
            raise StrataError(Code.UNAVAILABLE, "\n".join(["the hub of the demo has ended", *lines[-_SHOWN:]]))

    def wait(self) -> None:
        while True:
            self.check()
            time.sleep(LOOK_S)


@contextmanager
def _processes(folder: DemoFolder, environ: Mapping[str, str]) -> Iterator[_Processes]:
    from strata.base.parent import adopt_orphans
    from strata.cli.local_server import OWN_COMMAND
    from strata.demo.reaper import kill_descendants

    own = own_environment(folder.path, environ)
    command = (*OWN_COMMAND, "up", "--data", str(folder.path / "data"), "--listen", "127.0.0.1:0")
    # A reaper that is killed leaves its processes to this one.
    adopt_orphans()
    with (folder.path / "demo.log").open("ab") as log:
        reaper = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "strata.demo.reaper", str(os.getpid()), str(folder.path)),
                *(*command, "--slots", str(SLOTS)),
            ],
            env=own,
            cwd=folder.path,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # The folder is in use as long as a process of the demo may write there.
            pass_fds=(folder.lock,),
            # Ctrl-C is for the command, which ends the reaper then.
            start_new_session=True,
        )
    processes = _Processes(folder.path, own, reaper)
    try:
        yield processes
    except StrataError:
        # A request that fails because the hub has ended is not the reason.
        processes.check()
        raise
    finally:
        reaper.terminate()
        with suppress(subprocess.TimeoutExpired):
            reaper.wait(STOP_S)
        kill_descendants()


def own_environment(folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of the demo's processes: those of the person, without what leads to a hub or a collector."""
    kept = {name: value for name, value in environ.items() if not name.startswith(_IGNORED)}
    places = {"XDG_CONFIG_HOME": "config", "XDG_DATA_HOME": "share", "XDG_CACHE_HOME": "cache", "TMPDIR": "tmp"}
    for name, place in places.items():
        (folder / place).mkdir(mode=0o700)
        kept[name] = str(folder / place)
    return kept | _SETTINGS


def _show(processes: _Processes, began_s: float) -> str:
    """Queue the work, and return the dashboard's link when the API shows all of it."""
    from strata.cli.fleet.dashboard import request_login
    from strata.demo.promises import LEARNED, WORK, Promise, loss_falls, missing

    def print_stage(line: str) -> None:
        print_error(f"{time.monotonic() - began_s:5.1f} s  {line}")

    print_error(f"strata demo: everything is in {processes.folder}, and is removed at the end")
    model = _make_model(processes) if (with_model := _can_train()) else None
    with _connect(processes) as client:
        print_stage("the hub replies")
        _apply(client, _copy_package_folder("trainers", processes.folder) / MANIFEST)
        print_stage("jobs and a search are queued")
        promises, waiting = list(WORK), list(WORK)
        while waiting or model is not None:
            processes.check()
            if time.monotonic() - began_s > WITHIN_S:
                left = ", ".join(each.name for each in waiting)
                raise StrataError(Code.DEADLINE, f"not there after {WITHIN_S:g} s: {left}")
            if model is not None and model.poll() is not None:
                _start_training(client, processes, model)
                model = None
                learns = Promise("a model that learns", loss_falls("fine-tune", to_share=LEARNED, completed=True))
                promises.append(learns)
                waiting.append(learns)
                print_stage("a training server and a job that trains on it are queued")
            for promise in list(waiting):
                if line := promise.look(client):
                    waiting.remove(promise)
                    print_stage(line)
            time.sleep(LOOK_S)
        if gone := missing(client, promises):
            raise StrataError(Code.INTERNAL, "the dashboard lacks what the demo promises: " + "; ".join(gone))
        if not with_model:
            print_error(f"strata demo: no model learns here without torch: pip install '{DISTRIBUTION}[demo,train]'")
        config = processes.folder / "config"
        print_error(f"strata demo: ready. Other commands work with it as in: XDG_CONFIG_HOME={config} strata status")
        print_error("strata demo: Ctrl-C ends it and removes everything. The dashboard, to log in within two minutes:")
        return request_login(client).link


def _can_train() -> bool:
    return all(find_spec(module) is not None for module in TRAIN_MODULES)


def _connect(processes: _Processes) -> HubClient:
    """A client of the hub's own socket, as soon as the hub replies."""
    from strata.base.secret import read_secret
    from strata.base.unix_socket import format_unix_address
    from strata.fleet.client.hub_client import RETRY_FOR_S, HubClient
    from strata.fleet.wire.overview import StatusReply
    from strata.hub.compose import TOKEN_FILE
    from strata.hub.settings import SOCKET

    until_s = time.monotonic() + READY_S
    hub = processes.folder / "data" / "hub"
    while True:
        processes.check()
        # The token is written before the hub listens.
        if (hub / SOCKET).exists():
            bearer = read_secret(hub / TOKEN_FILE)
            client = HubClient(format_unix_address(hub / SOCKET), bearer=bearer, retry_for_s=RETRY_FOR_S)
            try:
                client.call("GET", "/v1/status", StatusReply)
            except StrataError as error:
                client.close()
                if error.code is not Code.UNAVAILABLE:
                    raise
            else:
                return client
        if time.monotonic() > until_s:
            raise StrataError(Code.DEADLINE, f"the hub does not reply after {READY_S:g} s", hint=f"see {processes.log}")
        time.sleep(_FIRST_LOOK_S)


def _copy_package_folder(name: str, folder: Path) -> Path:
    """A copy of a folder of the package in the demo's own."""
    import strata.demo

    source = Path(strata.demo.__file__).with_name(name)
    return shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))


def _apply(client: HubClient, path: Path) -> None:
    """Send the sources of the manifest's trainers, and queue its jobs, as `strata apply --no-describe` does."""
    from strata.cli.fleet.apply import send_manifest
    from strata.cli.fleet.prepare import prepare_manifest
    from strata.fleet.wire.artifacts import CommitReply

    prepared = prepare_manifest(path, print_error, dict, describe=False)
    for bundle in {each.sha256: each for each in prepared.bundles.values()}.values():
        client.send("PUT", f"/v1/source/{bundle.sha256}", bundle.content, CommitReply)
    send_manifest(client, prepared, {}, dry_run=False)


def _make_model(processes: _Processes) -> subprocess.Popen[bytes]:
    """Begin to make a small random model, in a copy of the folder of the model part."""
    from strata.base.parent import TIED_COMMAND
    from strata.cli.local_server import OWN_COMMAND

    folder = _copy_package_folder(MODEL, processes.folder)
    with processes.log.open("ab") as log:
        return subprocess.Popen(
            [*TIED_COMMAND, *OWN_COMMAND, "models", "tiny", str(folder / "base")],
            env=processes.environ,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _start_training(client: HubClient, processes: _Processes, model: subprocess.Popen[bytes]) -> None:
    """Queue the training server and the job that trains on it, with a key of this hub."""
    import msgspec

    from strata.cli.fleet.dashboard import request_login
    from strata.demo.promises import PROJECT
    from strata.fleet.wire.identities import HubKeyReply, HubKeyRequest
    from strata.fleet.wire.owners import SecretQuery, SecretRequest

    if model.returncode:
        raise StrataError(Code.INTERNAL, f"no model was made (status {model.returncode})", hint=f"see {processes.log}")
    wanted = msgspec.convert({"name": KEY, "role": "researcher", "owner": True}, HubKeyRequest)
    key = client.call_once("POST", "/v1/keys", HubKeyReply, body=wanted).secret
    for name, value in {"TRAINING_KEY": key, "TRAINING_URL": request_login(client).url}.items():
        body, query = SecretRequest(value=value), SecretQuery(project=PROJECT)
        client.call("PUT", f"/v1/secret/{name}", type(None), body=body, query=query)
    _apply(client, processes.folder / MODEL / MANIFEST)
