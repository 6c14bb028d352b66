"""Schemas of parameters that a researcher sends to cost the hub its time: they are refused in words, and soon."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from strata.base.errors import Code, StrataError
from strata.fleet.core.hyper import HyperSchema
from strata.fleet.http import validation
from strata.fleet.wire.manifests import TrainersReply
from tests.shell.fleet_http.running import Running, manifest_body, ok, refused, running

Tries = Callable[[int], None]
AREA = "hub: schemas"
SOON_S = 10.0
"""What a bounded check never takes, on a loaded machine either."""


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Running]:
    async with running(tmp_path / "hub") as started:
        yield started


def referring(depth: int, word: str = "allOf", times: int = 2) -> dict[str, Any]:
    """Definitions of which each refers so many times to the one before."""
    definitions: dict[str, Any] = {"a0": {"type": "integer"}}
    for level in range(1, depth + 1):
        definitions[f"a{level}"] = {word: [{"$ref": f"#/$defs/a{level - 1}"}] * times}
    return {"$defs": definitions, "properties": {"x": {"$ref": f"#/$defs/a{depth}"}}}


def names(count: int) -> dict[str, Any]:
    return {f"name{number:06}": {} for number in range(count)}


def chain(depth: int) -> dict[str, Any]:
    return referring(depth, times=1)


def wide(size: int) -> dict[str, Any]:
    """Many parts, each of which has to know the names of all."""
    parts = [{"$ref": "#/$defs/all"}] * size
    return {"$defs": {"all": {"properties": names(size)}}, "allOf": parts, "properties": {"x": {}}}


def choices(size: int) -> dict[str, Any]:
    return {"properties": {"x": {"allOf": [{"enum": [f"value {each}" for each in range(size)]}] * size}}}


HOSTILE: dict[str, Callable[[int], tuple[Any, Any]]] = {
    "all of the one before, twice": lambda n: (referring(n), {"x": 1}),
    "any of the one before, twice": lambda n: (referring(n, "anyOf"), {"x": "no"}),
    "one of the one before, twice": lambda n: (referring(n, "oneOf"), {"x": {"y": 1}}),
    "a long chain of references": lambda n: (chain(100 * n), {"x": 1}),
    "parts that know many names": lambda n: (wide(60 * n), {"x": 1, **dict.fromkeys(names(30 * n))}),
    "unknown names beside many known ones": lambda n: (
        {"properties": {"x": {}, **names(150 * n)}},
        dict.fromkeys((f"nam{number:06}" for number in range(60 * n)), 1),
    ),
    "many choices, many times": lambda n: (choices(40 * n), {"x": "no"}),
    "a name as long as a book": lambda n: ({"properties": {"x" * 400 * n: {}}}, {"y" * 400 * n: 1}),
}


def check(schema: Any, value: Any) -> list[Any]:
    try:
        return HyperSchema(schema).check(value)
    except StrataError as error:
        if error.code is not Code.INVALID:
            raise
        return [error.message]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("shape", HOSTILE)
@pytest.mark.attack(AREA, "shared references, names and choices that multiply, at depth N and 2N")
def test_a_schema_is_checked_or_refused_in_bounded_time(shape: str, tries: Tries) -> None:
    for depth in (30, 60):
        tries(1)
        schema, value = HOSTILE[shape](depth)
        began_s = time.process_time()
        check(schema, value)
        assert time.process_time() - began_s < SOON_S, depth


@pytest.mark.attack(AREA, "more parts than any trainer has parameters")
def test_a_schema_without_end_is_refused() -> None:
    assert "parts" in check({"properties": names(100_000)}, {})[0]


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"multipleOf": 1e-300}, 1e300),
        ({"multipleOf": 5e-324}, 2**53),
        ({"multipleOf": 10**400}, 1),
        ({"maximum": 10**400}, 1),
        ({"const": 10**400}, 1),
        ({"enum": [10**400]}, 1),
        ({"maxLength": 10**400}, "x"),
    ],
    ids=repr,
)
@pytest.mark.attack(AREA, "numbers that no quotient and no float can hold")
def test_a_number_that_cannot_be_computed_with_is_refused_in_words(schema: Any, value: Any) -> None:
    for said in check({"properties": {"x": schema}}, {"x": value}):
        assert "Error" not in str(said)


MANIFEST = """
project = "p"
[trainers.t]
command = ["t"]
directory = "/srv/t"
[[jobs]]
model = "m"
trainer = "t"
hyper = {x = 1}
"""


def apply_request(project: str, schemas: dict[str, Any]) -> dict[str, Any]:
    return manifest_body(MANIFEST.replace('"p"', f'"{project}"', 1), schemas=schemas)


LARGE = {"properties": {"x": {"description": "x" * (64 << 10)}}}


@pytest.mark.attack(AREA, "NEW 1: schemas of names that are no trainers, schemas without end, and thousands of them")
async def test_a_manifest_stores_schemas_of_its_own_trainers_only_and_small_ones(site: Running, tries: Tries) -> None:
    rob = await site.with_role("researcher")
    small: dict[str, Any] = {"properties": {"x": {}}}
    for schemas, words in (
        ({"t": small, "u": 1}, "schemas.u: the manifest has no trainer of this name"),
        ({f"u{number}": LARGE for number in range(200)}, "schemas.u0: the manifest has no trainer"),
        ({"t": LARGE}, "schemas.t: it takes 65"),
    ):
        for extra in ({"dry_run": True}, {}):
            tries(1)
            reply = await rob.post("/v1/manifest", json=apply_request("p", schemas) | extra)
            assert (refused(reply), words in reply.text) == ((400, "invalid"), True), reply.text
    assert await site.hub.context.schemas.schemas() == {}
    assert (await rob.post("/v1/manifest", json=apply_request("p", {"t": small}))).status_code == 200
    listed = ok(await rob.get("/v1/trainers"), TrainersReply).trainers
    assert listed["p/t"].params == small
    trainers = "".join(f'[trainers.t{each}]\ncommand = ["t"]\ndirectory = "/srv/t"\n' for each in range(80))
    just_small = {"properties": {"x": {"description": "x" * (60 << 10)}}}
    many = manifest_body('project = "many"\n' + trainers, schemas={f"t{each}": just_small for each in range(80)})
    tries(1)
    reply = await rob.post("/v1/manifest", json=many)
    assert (refused(reply), "together" in reply.text) == ((400, "invalid"), True)


@pytest.mark.attack(AREA, "NEW 1: schemas of one researcher, in the way of each job of the others")
async def test_the_schemas_of_others_are_never_read(site: Running, tries: Tries) -> None:
    rob = await site.with_role("researcher")
    assert (await rob.post("/v1/manifest", json=apply_request("p", {"t": {"properties": {"x": {}}}}))).is_success
    # Whoever decodes it fails.
    await site.hub.context.schemas.put_schemas({"eve/t": msgspec.Raw(b"{")})
    job: dict[str, Any] = {"spec": {"project": "p", "model": "n", "trainer": "t", "hyper": {"x": 1}}}
    for path, body in (("/v1/jobs", job), ("/v1/manifest", apply_request("p", {}))):
        tries(1)
        assert (await rob.post(path, json=body)).is_success, path
    tries(1)
    assert (await rob.get("/v1/trainers")).is_success
    job["spec"] |= {"model": "other", "hyper": {"unknown": 1}}
    assert refused(await rob.post("/v1/jobs", json=job)) == (400, "invalid"), "the trainer's own schema is read"
    changed = apply_request("p", {})
    changed["manifest"]["jobs"] = {}
    assert (await rob.post("/v1/manifest", json=changed)).is_success


async def dry_run(client: httpx.AsyncClient, schema: Any) -> httpx.Response:
    body = manifest_body(MANIFEST, schemas={"t": schema}, dry_run=True)
    return await client.post("/v1/manifest", json=body)


@pytest.mark.attack(AREA, "eight manifests with a schema of 60 definitions, each twice the one before")
async def test_the_hub_refuses_a_schema_that_doubles_and_answers_others(site: Running, tries: Tries) -> None:
    rob, eve = await site.with_role("researcher"), await site.with_role("researcher")
    tries(8)
    sent = [asyncio.create_task(dry_run(rob, referring(60))) for _ in range(8)]
    async with asyncio.timeout(60.0):
        assert (await dry_run(eve, {"properties": {"x": {}}})).status_code == 200
        for reply in await asyncio.gather(*sent):
            assert (refused(reply), "too many" in reply.text) == ((400, "invalid"), True)


@pytest.mark.attack(AREA, "a multiple of almost nothing")
async def test_a_quotient_that_is_too_large_is_no_defect_of_the_hub(site: Running) -> None:
    reply = await dry_run(await site.with_role("researcher"), {"properties": {"x": {"multipleOf": 1e-320}}})
    assert (refused(reply), "multiple of" in reply.text) == ((400, "invalid"), True)


@pytest.mark.attack(AREA, "checks that go on for clients that have left")
async def test_a_check_ends_when_its_client_leaves_or_its_time_is_over(site: Running, tries: Tries) -> None:
    pool = site.hub.context.validation
    began, ended = threading.Semaphore(0), threading.Semaphore(0)

    def endless(checkpoint: Callable[[], None]) -> None:
        began.release()
        try:
            while True:
                checkpoint()
        finally:
            ended.release()

    leaving = [asyncio.create_task(pool.run(owner, endless)) for owner in ("rob", "rob", "eve")]
    for _ in range(2):
        assert await asyncio.to_thread(began.acquire, timeout=30)
    assert not began.acquire(blocking=False), "one owner has one thread"
    for task in leaving:
        task.cancel()
    tries(3)
    await asyncio.wait(leaving)
    for _ in range(2):
        assert await asyncio.to_thread(ended.acquire, timeout=30)
    short = validation.ValidationPool(limit_s=0.0)
    with pytest.raises(StrataError) as over:
        await short.run("rob", endless)
    short.close()
    assert over.value.code is Code.DEADLINE
    assert await pool.run("rob", lambda _: 3) == 3
