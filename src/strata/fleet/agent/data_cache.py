"""Provides the datasets of a job from the host's cache: fetches the artifact, makes it readable, and names the
variables STRATA_DATA_….
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from strata.base import log
from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.fleet.agent.host_cache import CacheEntry, HostCache
from strata.fleet.agent.path_names import PathName, artifact_name
from strata.fleet.artifacts.files import materialise
from strata.fleet.client.hub_api import HubApi
from strata.fleet.core.jobspec import DataSource

_log = log.get(__name__)


class JobData(msgspec.Struct, frozen=True, kw_only=True):
    """The datasets of one attempt."""

    folders: dict[str, str]
    """The folder by the name that the trainer gives each."""
    facts: dict[str, Any]
    """What the hub keeps with the attempt, by the same name."""


def provide_data(
    cache: HostCache,
    hub: HubApi,
    sources: Mapping[str, DataSource],
    key: PathName,
    wanted: Callable[[], bool] = lambda: True,
) -> JobData:
    """The datasets among these sources as folders of this host, fetched where they are not here yet."""
    folders, facts = {}, {}
    for label, source in sources.items():
        if not source.dataset:
            continue
        began_s = time.monotonic()
        name = artifact_name(source.digest)
        entry, cached = cache.provide(name, key, lambda folder, name=name: _fetch(hub, folder, name, wanted), wanted)  # type: ignore[misc]
        waited_s = round(time.monotonic() - began_s, 3)
        _log.info("data_provided", data=source.dataset, artifact=name, cached=cached, waited_s=waited_s)
        folders[label] = str(cache.content(name))
        facts[label] = {"artifact": name, "cached": cached, "waited_s": waited_s, "size_bytes": entry.size_bytes}
    return JobData(folders=folders, facts=facts)


def variable_name(label: str) -> str:
    """The variable that tells the job where a dataset is."""
    return "STRATA_DATA_" + re.sub(r"[^A-Z0-9]", "_", label.upper())


def _fetch(hub: HubApi, folder: Path, artifact: str, wanted: Callable[[], bool]) -> CacheEntry:
    reply = hub.artifact(artifact)

    def fetch(digest: str, size: int) -> bytes:
        del size
        if not wanted():
            raise StrataError(Code.STALE, "the attempt was stopped while its data was fetched")
        failpoint("agent.data.chunk")
        return hub.chunk(digest, reply.urls.get(digest, ""))

    materialise(reply.manifest, fetch, folder / "content")
    _make_readable(folder / "content")
    return CacheEntry(size_bytes=reply.size)


def _make_readable(folder: Path) -> None:
    """Makes files readable for the user of the job, who may not write here."""
    for place, _, files in os.walk(folder):
        Path(place).chmod(0o755)
        for name in files:
            path = Path(place, name)
            path.chmod(path.stat().st_mode & 0o111 | 0o444)
