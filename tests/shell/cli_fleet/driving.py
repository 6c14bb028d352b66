"""The command line as a person uses it, in this process, against a hub that is a real one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from strata.base.secret import Secret
from strata.cli.main import run
from strata.fleet.client.hub_api import HubApi
from strata.fleet.client.hub_client import HubClient
from strata.fleet.core.capability import Capability
from strata.fleet.core.job import Cause
from strata.fleet.wire.identities import LocalHostReply, LocalHostRequest
from strata.fleet.wire.leases import CompleteRequest, LeaseGiven
from tests.shell.fleet_agent.running import HubProcess


@dataclass(frozen=True)
class Said:
    status: int
    out: str
    err: str

    @property
    def value(self) -> Any:
        return json.loads(self.out)


class Person:
    """Whose home is a folder of the test."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.home = home
        self._capsys = capsys
        for name in ("STRATA_URL", "STRATA_OPERATOR_TOKEN", "STRATA_OPERATOR_TOKEN_FILE", "APPDATA", "LOCALAPPDATA"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HOME", str(home))
        monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "config"))
        monkeypatch.setenv("XDG_DATA_HOME", str(home / "data"))
        monkeypatch.setenv("COLUMNS", "80")

    def says(self, *words: str) -> Said:
        self._capsys.readouterr()
        status = run(words)
        out, err = self._capsys.readouterr()
        return Said(int(status), out, err)

    def logs_in(self, hub: HubProcess) -> None:
        done = self.says("login", hub.address, "--token-file", str(hub.data / "operator.token"))
        assert done.status == 0, done.err


class HostByHand:
    """A host of the fleet whose agent is the test: it speaks to the hub as an agent does."""

    def __init__(self, hub: HubProcess, name: str) -> None:
        body = LocalHostRequest(name=name)
        made = hub.operator.call("POST", "/v1/hosts/local", LocalHostReply, body=body)
        self.name = name
        self.hub = HubApi(HubClient(hub.address, bearer=Secret(made.secret)))
        self.hub.register(Capability(hostname=name, cores=4, ram_bytes=8 << 30))
        self._claims = 0

    def close(self) -> None:
        self.hub.client.close()

    def claim(self) -> LeaseGiven:
        for _ in range(12):
            self._claims += 1
            leases = self.hub.claim(f"{self.name}-{self._claims}", 1, 5.0)
            if leases:
                return leases[0]
        raise AssertionError("there was no job for this host within a minute")

    def completes(self) -> LeaseGiven:
        lease = self.claim()
        self.hub.complete(lease, CompleteRequest(epoch=lease.epoch))
        return lease

    def fails(self, error: str) -> LeaseGiven:
        lease = self.claim()
        self.hub.fail(lease, Cause.USER_ERROR, error, {})
        return lease
