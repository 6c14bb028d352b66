"""A hub in this process that is called through its routes, without sockets: its clock is moved by hand."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import httpx
from starlette.types import Receive, Scope, Send

from strata.base.atomic import create_file
from strata.http.authentication import UNIX_SOCKET
from strata.hub.compose import FOLDER_ID_FILE, TOKEN_FILE, Hub, open_hub
from strata.hub.secret_store import KEY_FILE
from strata.hub.settings import GangCoordinatorSettings, HubSettings
from tests.support.manual_clock import ManualClock

FOLDER_ID: Final = "golden"
COORDINATOR: Final = GangCoordinatorSettings(address="127.0.0.1:7070")


class RunsOnce(Protocol):
    async def run_once(self) -> None: ...


@dataclass
class Caller:
    http: httpx.AsyncClient

    async def call(self, method: str, path: str, body: Any = None, **query: Any) -> Any:
        reply = await self.http.request(method, path, json=body, params=query)
        assert reply.is_success, (method, path, reply.status_code, reply.text)
        return reply.json() if reply.headers.get("content-type", "").startswith("application/json") else reply.content

    async def get(self, path: str, **query: Any) -> Any:
        return await self.call("GET", path, **query)

    async def post(self, path: str, body: Any = None, **query: Any) -> Any:
        return await self.call("POST", path, body, **query)

    async def refused(self, path: str, body: Any = None) -> str:
        """Returns the code with which a POST is refused."""
        reply = await self.http.post(path, json=body)
        assert reply.is_error, (path, reply.text)
        return str(reply.json()["error"]["code"])

    async def put(self, path: str, body: Any, **query: Any) -> Any:
        return await self.call("PUT", path, body, **query)

    async def send(self, path: str, content: bytes, **query: Any) -> Any:
        reply = await self.http.put(path, content=content, params=query)
        assert reply.is_success, (path, reply.status_code, reply.text)
        return reply.json() if reply.content else None


@dataclass
class Site:
    hub: Hub
    clock: ManualClock
    data: Path
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def operator(self) -> Caller:
        return await self._caller({"X-Operator-Token": (self.data / TOKEN_FILE).read_text().strip()})

    async def bearer(self, text: str) -> Caller:
        return await self._caller({"Authorization": f"Bearer {text}"})

    async def _caller(self, headers: dict[str, str]) -> Caller:
        async def private(scope: Scope, receive: Receive, send: Send) -> None:
            await self.hub.app({**scope, UNIX_SOCKET: True}, receive, send)

        client = httpx.AsyncClient(
            transport=httpx.ASGITransport(private, client=("127.0.0.1", 0)), base_url="http://hub", headers=headers
        )
        return Caller(await self.stack.enter_async_context(client))

    async def run_loop(self, kind: type[RunsOnce]) -> None:
        """One round of the loop that an object of this kind runs."""
        for loop in self.hub.loops:
            owner = getattr(loop.run_once, "__self__", None)
            if isinstance(owner, kind):
                await owner.run_once()

    async def advance(self, seconds: float) -> None:
        await self.clock.advance(seconds)
        await self.hub.context.fleet.leases.tick()
        await self.hub.context.fleet.samples.run_once()

    async def describe(self) -> dict[str, Any]:
        """Says what the database means, in words and numbers that a later version has to say as well."""
        operator = await self.operator()
        jobs = [
            await operator.get(f"/v1/job/{job['id']}") for job in (await operator.get("/v1/jobs", limit=1000))["jobs"]
        ]
        return {
            "jobs": {
                each["job"]["spec"]["name"]: {
                    "id": each["job"]["id"],
                    "status": each["job"]["status"],
                    "epoch": each["job"]["epoch"],
                    "owner": each["job"]["owner"],
                    "reason": each["job"]["reason"],
                    "trainer": each["job"]["trainer_digest"],
                    "attempts": [[made["epoch"], made["outcome"], made["cause"]] for made in each["attempts"]],
                }
                for each in jobs
            },
            "hosts": {
                each["name"]: {"id": each["id"], "state": each["state"], "presence": each["presence"]}
                for each in (await operator.get("/v1/workers"))["hosts"]
            },
            "reserved": [
                [each.host_id, each.job.job_id, each.kind]
                for each in await self.hub.context.fleet.store.leases.reservations()
            ],
            "trainers": {
                name: {"digest": each["digest"], "params": each["params"]}
                for name, each in (await operator.get("/v1/trainers"))["trainers"].items()
            },
            "artifacts": {
                each["artifact_id"]: {"kind": each["lineage"]["kind"], "parents": each["lineage"]["parents"]}
                | {"metrics": each["lineage"]["metrics"], "pinned": each["pinned"], "owner": each["owner"]}
                for each in (await operator.get("/v1/artifacts"))["artifacts"]
            },
            "sweeps": {
                each["name"]: {"trials": each["trials"], "by_status": each["by_status"]}
                for each in (await operator.get("/v1/sweeps"))["sweeps"]
            },
            "schedules": {
                each["name"]: {"cron": each["cron"], "paused": each["paused"], "last_job": each["last_job"]}
                for each in (await operator.get("/v1/schedules"))["schedules"]
            },
            "keys": {
                each["name"]: {"role": each["role"], "revoked": each["revoked_at_s"] is not None}
                for each in (await operator.get("/v1/keys"))["keys"]
            },
            "invites": [[each["name"], each["pool"]] for each in (await operator.get("/v1/invites"))["invites"]],
            "quotas": {each["owner"]: each["quota"] for each in (await operator.get("/v1/quotas"))["quotas"]},
        }

    async def events(self) -> list[str]:
        """When who did what to what, oldest first."""
        found = (await (await self.operator()).get("/v1/events", limit=1000))["events"]
        return [f"{each['at_s']:.0f} {each['actor']} {each['kind']} {each['subject']}" for each in found]


@asynccontextmanager
async def open_site(data: Path, database: str, clock: ManualClock, *, secrets_key: str) -> AsyncIterator[Site]:
    data.mkdir(mode=0o700, exist_ok=True)
    for name, text in ((KEY_FILE, secrets_key), (FOLDER_ID_FILE, FOLDER_ID)):
        create_file(data / name, f"{text}\n".encode())
    settings = HubSettings(data=data, database=database, keep_free_bytes=0, coordinator=COORDINATOR)
    async with open_hub(settings, clock) as hub:
        site = Site(hub, clock, data)
        async with site.stack:
            yield site
