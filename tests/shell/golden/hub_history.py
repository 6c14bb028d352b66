"""A hub that has done everything once: jobs in every status, hosts, leases, sweeps, artifacts, people and their things.

Every table has a row. Identities, secrets and keys are made up, and open nothing but the database that they are in.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final

import msgspec

from strata.base.digest import sha256_hex
from strata.base.secret import Secret
from strata.fleet.artifacts.manifest import ArtifactKind
from strata.fleet.core.manifest import parse_manifest
from strata.hub.compose import hub_id
from strata.hub.cursor_store import CursorStore
from strata.hub.disk import DiskGuard
from strata.hub.schedules import ScheduleRunner
from strata.hub.sweeps import SweepRunner
from strata.identity.records import HostIdentity
from strata.identity.tokens import hash_secret, spell_host_secret
from tests.conformance.artifacts.making import manifest_of
from tests.shell.golden.folder import HubMeaning, version_in_development
from tests.shell.golden.hub_site import Caller, Site

START_S: Final = 1_790_000_000.0
SECRET_VALUE: Final = "a value that is encrypted"
SOURCE: Final = b"the source of a trainer"
SECRETS_KEY: Final = "0123456789abcdef" * 4
HOST_SECRET: Final = Secret("0123456789" * 4)
HOSTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "desk": {
        "os": "linux",
        "arch": "x86_64",
        "cores": 64,
        "ram_bytes": 64 << 30,
        "cuda": "12.8",
        "gpus": [{"name": "card", "vram_bytes": 24 << 30, "uuid": "GPU-0"}],
        "labels": {"room": "office"},
    },
    "pi": {"os": "linux", "arch": "aarch64", "cores": 4, "ram_bytes": 4 << 30},
    "away": {"os": "linux", "arch": "x86_64", "cores": 4, "ram_bytes": 8 << 30},
}
MANIFEST: Final = """
[trainers.default]
command = ["python", "train.py"]
bundle = "sha256:{source}"
secrets = ["TOKEN"]
env = {{ OMP_NUM_THREADS = "4" }}

[trainers.default.data]
episodes = {{ source = "strata:episodes", digest = "{data}" }}

[hosts.desk]
labels = {{ room = "office" }}
quiet_hours = ["mon-fri 03:00-04:00"]

[hosts.pi]
deny_jobs = ["big-*"]

[[jobs]]
name = "completed"
model = "small"
seed = 1
hyper = {{ rate = 0.1, layers = [8, 8] }}
min_cores = 1
min_ram_gib = 1
allowed_hosts = ["desk"]

[[jobs]]
name = "failed"
model = "small"
seed = 2
min_cores = 1
min_ram_gib = 1
max_attempts = 1
allowed_hosts = ["desk"]

[[jobs]]
name = "cancelled"
model = "small"
seed = 3
min_cores = 1
min_ram_gib = 1
allowed_hosts = ["nowhere"]

[[jobs]]
name = "running"
model = "small"
seed = 4
min_cores = 1
min_ram_gib = 1
require_cuda = true
gpu_share = 0.5
allowed_hosts = ["desk"]

[[jobs]]
name = "claimed"
model = "small"
seed = 5
min_cores = 1
min_ram_gib = 1
allowed_hosts = ["desk"]

[[jobs]]
name = "retried"
model = "small"
seed = 6
min_cores = 1
min_ram_gib = 1
allowed_hosts = ["desk"]

[[jobs]]
name = "refused"
model = "small"
seed = 7
min_cores = 1
min_ram_gib = 1
allowed_hosts = ["desk", "pi"]

[[jobs]]
name = "lost"
model = "small"
seed = 8
min_cores = 1
min_ram_gib = 1
allowed_hosts = ["away"]

[[jobs]]
name = "later"
model = "small"
seed = 9
not_before = 2030-01-01T00:00:00Z

[[jobs]]
name = "after"
model = "small"
seed = 10
after = ["failed"]

[[jobs]]
name = "server"
model = "served"
kind = "server"
idle_s = 3600
min_cores = 1
min_ram_gib = 1
allowed_hosts = ["desk"]

[[jobs]]
name = "gang"
model = "wide"
workers = 4
workers_per_host = 2
min_cores = 1
min_ram_gib = 1
allowed_hosts = ["nowhere"]

[[sweeps]]
name = "grid"
model = "small"
mode = "grid"
min_cores = 1
min_ram_gib = 1
allowed_hosts = ["nowhere"]
grid = {{ "rate" = [0.1, 0.2] }}

[[sweeps]]
name = "search"
model = "small"
mode = "search"
min_cores = 1
min_ram_gib = 1
allowed_hosts = ["nowhere"]

[sweeps.search]
objective = {{ loss = "minimize" }}
trials = 4
parallel = 2
space = {{ rate = {{ log_uniform = [0.001, 1.0] }} }}
"""
HERS: Final = """
project = "hers"

[trainers.default]
command = ["python", "train.py"]
bundle = "sha256:{source}"

[[schedules]]
name = "often"
model = "small"
cron = "*/2 * * * *"
allowed_hosts = ["nowhere"]

[[schedules]]
name = "paused"
model = "small"
cron = "@weekly"
"""
SCHEMA: Final = {"type": "object", "properties": {"rate": {"type": "number"}, "layers": {"type": "array"}}}


class Chance:
    """Bytes that follow from their number: what a hub draws is the same each time it is filled."""

    def __init__(self) -> None:
        self._drawn = 0

    def token_bytes(self, size: int = 32) -> bytes:
        self._drawn += 1
        return hashlib.shake_128(f"chance {self._drawn}".encode()).digest(size)

    def token_hex(self, size: int = 32) -> str:
        return self.token_bytes(size).hex()


@contextmanager
def fixed_chance() -> Iterator[None]:
    """Stands in for what a hub draws its ids, secrets, nonces and jitter from."""
    chance, state = Chance(), random.getstate()
    drawn = {name: getattr(secrets, name) for name in ("token_bytes", "token_hex")}
    random.seed(0)
    for name in drawn:
        setattr(secrets, name, getattr(chance, name))
    try:
        yield
    finally:
        random.setstate(state)
        for name, draw in drawn.items():
            setattr(secrets, name, draw)


@dataclass
class History:
    site: Site
    operator: Caller
    hosts: dict[str, Caller] = field(default_factory=dict)
    host_ids: dict[str, str] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)
    """The epochs of the last attempts, by the name of the job."""
    ids: dict[str, str] = field(default_factory=dict)

    async def enrol(self, name: str, number: int) -> None:
        self.host_ids[name] = host_id = f"host_{number:026d}"
        await self.site.hub.context.identity.add_host(
            HostIdentity(
                id=host_id,
                name=name,
                public_key=sha256_hex(name.encode()),
                enrolled_at_s=self.site.clock.wall_s(),
                pool="",
                labels=("room=office",),
                secret_hash=hash_secret(HOST_SECRET),
            ),
            "operator",
        )
        self.hosts[name] = await self.site.bearer(spell_host_secret(host_id, HOST_SECRET))
        body = {"capability": {"hostname": name, **HOSTS[name]}, "agent_version": version_in_development()}
        await self.hosts[name].post("/v1/host/register", body)

    async def claim(self, host: str, claim_id: str) -> None:
        """Claims until there is nothing for the host."""
        for number in itertools.count():
            leases = (await self.hosts[host].post("/v1/job/claim", {"claim_id": f"{claim_id}-{number}"}))["leases"]
            if not leases:
                return
            for lease in leases:
                self.epochs[lease["spec"]["name"]] = lease["epoch"]

    async def beat(self, host: str, *names: str, **sample: float) -> None:
        """Renews leases; only the job that is called so is still being prepared."""
        leases = [
            {"job_id": self.ids[name], "epoch": self.epochs[name], "running": name != "claimed"} for name in names
        ]
        await self.hosts[host].post("/v1/heartbeats", {"leases": leases, "sample": sample, "incarnation": f"{host}:1"})

    async def report(self, host: str, name: str, what: str, **body: Any) -> None:
        await self.hosts[host].post(f"/v1/job/{self.ids[name]}/{what}", {"epoch": self.epochs[name], **body})

    async def upload(self, caller: Caller, content: bytes, kind: ArtifactKind, name: str = "", **lineage: Any) -> str:
        manifest = manifest_of({"weights.bin": content})
        (digest,) = manifest.chunks()
        await caller.post("/v1/chunks/missing", {"chunks": {digest: len(content)}})
        await caller.send(f"/v1/chunk/{digest}", content, size=len(content))
        body: dict[str, Any] = {"manifest": msgspec.to_builtins(manifest), "lineage": {"kind": kind, **lineage}}
        if name:
            body |= {"job_id": self.ids[name], "epoch": self.epochs[name]}
        return str((await caller.post("/v1/artifacts", body))["artifact_id"])


async def fill(site: Site) -> HubMeaning:
    with fixed_chance():
        history = History(site, await site.operator())
        await _declare(history)
        for number, name in enumerate(HOSTS):
            await history.enrol(name, number)
        await _work(history)
        key = await _people(history)
        await _lose(history)
        await _keep_house(history)
        return HubMeaning(
            at_s=site.clock.wall_s(),
            key=key,
            secrets_key=SECRETS_KEY,
            secrets={"project:default": {"TOKEN": SECRET_VALUE}, "owner:alice": {"HERS": SECRET_VALUE}},
            hosts={name: spell_host_secret(host_id, HOST_SECRET) for name, host_id in history.host_ids.items()},
            description=await site.describe(),
            events=await site.events(),
        )


async def _declare(history: History) -> None:
    """Uploads source and data, and applies a manifest."""
    operator, source = history.operator, sha256_hex(SOURCE)
    await operator.send(f"/v1/source/{source}", SOURCE)
    data = await history.upload(operator, b"episodes", ArtifactKind.DATA, model="episodes")
    await operator.put("/v1/secret/TOKEN", {"value": SECRET_VALUE}, project="default")
    manifest = msgspec.to_builtins(parse_manifest(MANIFEST.format(source=source, data=data), "fleet.toml").resolve())
    await operator.post("/v1/manifest", {"manifest": manifest, "schemas": {"default": SCHEMA}})
    for job in (await operator.get("/v1/jobs", limit=1000))["jobs"]:
        history.ids[job["spec"].get("name") or job["id"]] = job["id"]


async def _work(history: History) -> None:
    site, desk = history.site, history.hosts["desk"]
    await site.advance(1.0)
    await history.claim("desk", "claim-1")
    await history.claim("away", "claim-2")
    await history.claim("pi", "claim-3")
    await history.beat("desk", "completed", "running", "server", cpu_use=0.5, ram_used_gib=8.0)
    await history.beat("pi", cpu_use=0.1)
    await history.beat("away", "lost")
    await desk.send(f"/v1/job/{history.ids['running']}/log", b"step 1\n", epoch=history.epochs["running"], offset=0)
    checkpoint = await history.upload(desk, b"half of it", ArtifactKind.CHECKPOINT, "running")
    result = await history.upload(
        desk, b"weights", ArtifactKind.RESULT, "completed", metrics={"loss": 0.25}, parents=(checkpoint,)
    )
    await history.report("desk", "completed", "complete", artifact=result, metrics={"loss": 0.25}, facts={"steps": 10})
    await history.report("desk", "failed", "fail", cause="user_error", error="exit status 1")
    await history.report("desk", "retried", "fail", cause="infra", error="the disk is full")
    await history.report("desk", "refused", "fail", cause="setup_error", error="the commit is not there")
    await desk.put(
        f"/v1/job/{history.ids['server']}/server",
        {"epoch": history.epochs["server"], "address": "unix:/run/server.sock", "models": ["tiny"]},
    )
    await history.operator.post(f"/v1/job/{history.ids['cancelled']}/cancel", {"reason": "not needed"})
    await history.operator.post(f"/v1/job/{history.ids['running']}/exec", {"command": ["nvidia-smi", "-L"]})
    await history.operator.post(f"/v1/artifact/{result}/pin", {"reason": "published"})
    large = {"model": "big", "name": "big", "priority": 5, "needs": {"min_cores": 64, "allowed_hosts": ["desk"]}}
    await history.operator.post("/v1/jobs", {"spec": large})


async def _people(history: History) -> str:
    """Keys, an invitation, a login, a quota, and what a researcher declares in a project of her own; her key."""
    operator, site = history.operator, history.site
    made = await operator.post("/v1/keys", {"name": "alice", "role": "researcher"})
    gone = await operator.post("/v1/keys", {"name": "bob", "role": "viewer"})
    await operator.post(f"/v1/key/{gone['key']['id']}/revoke")
    await operator.post("/v1/invites", {"name": "new", "pool": "lab", "labels": ["room=lab"]})
    await operator.post("/v1/quotas", {"owner": "*", "quota": {"jobs": 100, "gpu_hours": 8.0}})
    alice = await site.bearer(made["secret"])
    await alice.post("/v1/login/code")
    await alice.put("/v1/secret/HERS", {"value": SECRET_VALUE})
    await alice.put("/v1/subscription/mine", {"url": "ntfy://golden"})
    manifest = parse_manifest(HERS.format(source=sha256_hex(SOURCE)), "hers.toml").resolve()
    await alice.post("/v1/manifest", {"manifest": msgspec.to_builtins(manifest)})
    await alice.post("/v1/schedule/hers/paused/pause")
    return str(made["secret"])


async def _lose(history: History) -> None:
    """One host says nothing any more, until its lease has run out. A job that waits has a host reserved."""
    site = history.site
    for _ in range(16):
        await site.advance(10.0)
        await history.beat("desk", "running", "claimed", "server", cpu_use=0.5, ram_used_gib=8.0)
        await history.beat("pi", cpu_use=0.1)
    await history.operator.post(f"/v1/host/{history.host_ids['pi']}/pause", {"reason": "it is moved"})
    # The first round finds out that the job is stuck.
    for _ in range(2):
        await site.hub.context.fleet.claims.plan_reservations()


async def _keep_house(history: History) -> None:
    """What the hub does by itself: trials of a sweep, a run of a schedule, figures, and cursors of its readers."""
    site = history.site
    await site.run_loop(SweepRunner)
    await site.run_loop(ScheduleRunner)
    await site.hub.context.history.run_once()
    await site.run_loop(DiskGuard)
    await site.hub.context.authenticator.write_uses()
    cursors = site.hub.context.schemas
    assert isinstance(cursors, CursorStore)
    # The database's own clock says how long this lease runs, and its holder has the name of the machine.
    await cursors.release("sweeps", hub_id(site.data))
    await cursors.acquire("golden", "hub", inf)
    await cursors.put_cursor("webhook", await site.hub.context.feed.newest())
