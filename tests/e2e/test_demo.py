"""`strata demo` as a person runs it: it shows what it promises, and leaves nothing, however it ends."""

from __future__ import annotations

import os
import pty
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import httpx
import psutil  # type: ignore[import-untyped]
import pytest

from strata.base.secret import read_secret
from strata.coord.view import GangsView
from strata.fleet.client.hub_client import HubClient
from strata.fleet.core.job import JobStatus
from strata.fleet.wire.jobs import Job, JobsQuery, JobsReply
from strata.fleet.wire.streams import MetricsQuery, MetricsReply
from strata.fleet.wire.sweeps import SweepReply
from tests.e2e.browser import chromium, new_context
from tests.e2e.demo_process import LINK, WITHIN_S, Demo
from tests.e2e.machines import Person
from tests.e2e.screens import Screen, describe, read_ids, read_screens
from tests.shell.fleet_agent.waiting import eventually, is_alive
from tests.shell.web.browsing import HTML, SAME_ORIGIN

RUNS: Final = "the loss of long-run fell"
"""A line of a demo whose jobs run."""

pytestmark = pytest.mark.timeout(2 * WITHIN_S)


@pytest.fixture
def place() -> Iterator[Path]:
    """A short one, because Unix sockets lie below it."""
    with tempfile.TemporaryDirectory(prefix="strata-") as folder:
        yield Path(folder)


@pytest.fixture
def person(tmp_path: Path) -> Person:
    made = Person(tmp_path / "home")
    contexts = made.home / "config" / "strata" / "contexts.json"
    contexts.parent.mkdir(parents=True)
    contexts.write_text('{"current": "lab", "contexts": {"lab": {"url": "https://hub.example"}}}')
    return made


def files_of(home: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in (home / "config").rglob("*") if path.is_file()}


def demo_folders(place: Path) -> list[Path]:
    return [*place.glob("strata-demo-*")]


def processes_that_name(folder: Path) -> list[int]:
    """Every process of this machine with the folder in its command line."""
    found = psutil.process_iter(["cmdline"])
    return [each.pid for each in found if any(str(folder) in word for word in each.info["cmdline"] or ())]


def nothing_is_left(pids: list[int], folder: Path) -> None:
    eventually(lambda: not any(map(is_alive, pids)))
    eventually(lambda: not processes_that_name(folder))
    eventually(lambda: not folder.exists())


@contextmanager
def log_in(link: str) -> Iterator[httpx.Client]:
    """A browser without scripts that followed the link."""
    url, _, code = link.partition("/login?code=")
    with httpx.Client(base_url=url, follow_redirects=True, timeout=30, headers=HTML) as browser:
        browser.post("/login", data={"code": code}, headers=SAME_ORIGIN).raise_for_status()
        yield browser


def screens_now(browser: httpx.Client) -> dict[str, Screen]:
    """What Chromium shows of the pages that have pictures."""
    url = str(browser.base_url)
    cookies = [{"name": name, "value": value, "url": url} for name, value in browser.cookies.items()]
    with chromium() as started:
        context = new_context(started, cookies=cookies)
        ids = read_ids(context, url)
        return {name: describe(context.new_page(), url, each.path, ids) for name, each in read_screens().items()}


def job(client: HubClient, name: str) -> Job:
    (found,) = client.call("GET", "/v1/jobs", JobsReply, query=JobsQuery(project="demo", name=name)).jobs
    return found


def losses(client: HubClient, name: str) -> tuple[float, ...]:
    query = MetricsQuery(points=100, names=("loss",))
    (series,) = client.call("GET", f"/v1/job/{job(client, name).id}/metrics", MetricsReply, query=query).series
    return series.values


@pytest.mark.parametrize(
    "with_model", [False, pytest.param(True, marks=pytest.mark.skipif(not find_spec("torch"), reason="no torch"))]
)
def test_a_demo_shows_what_it_promises_and_removes_it_at_the_end(person: Person, place: Path, with_model: bool) -> None:
    before = files_of(person.home)
    demo = Demo(person, place, with_model=with_model)
    try:
        link = demo.until_it_prints(LINK)[0]
        (folder,) = demo_folders(place)
        hub = folder / "data" / "hub"
        with HubClient(f"unix:{hub / 'hub.sock'}", bearer=read_secret(hub / "operator.token")) as client:
            assert job(client, "bad-table").status is JobStatus.FAILED
            assert job(client, "primes/0").status is JobStatus.COMPLETED
            (gang,) = client.call("GET", "/v1/gangs", GangsView).gangs
            assert gang.status == "FINISHED"
            assert job(client, "long-run").status is JobStatus.RUNNING
            assert losses(client, "long-run")[-1] < 0.8 * losses(client, "long-run")[0]
            sweep = client.call("GET", "/v1/sweep/demo/rates", SweepReply)
            assert (sweep.sweep.state, sweep.sweep.trials) == ("ended", 6)
            assert any(trial.pruned for trial in sweep.trials)
            assert any(trial.status is JobStatus.COMPLETED for trial in sweep.trials)
            if with_model:
                assert job(client, "training-server").serving == "serving"
                assert losses(client, "fine-tune")[-1] < 0.5 * losses(client, "fine-tune")[0]
        with log_in(link) as browser:
            pages = {path: browser.get(path).raise_for_status().text for path in ("/jobs", "/sweeps", "/gangs")}
            assert all(name in pages["/jobs"] for name in ("long-run", "bad-table", "primes", "too-large"))
            assert "rates" in pages["/sweeps"]
            assert "primes" in pages["/gangs"]
            if not with_model:
                assert screens_now(browser) == read_screens(), "the pictures are old: make pictures"
        pids = demo.below()
        assert len(pids) >= 4, "the reaper, the hub with its agent, a supervisor and its job"
        demo.process.send_signal(signal.SIGINT)
        assert demo.process.wait(60) == 0, demo.printed
        assert demo.printed.endswith("strata demo: ended, everything is removed\n")
        nothing_is_left(pids, folder)
    finally:
        demo.close()
    assert files_of(person.home) == before
    assert "these variables do not count here: STRATA_URL" in demo.printed


def test_a_demo_that_is_killed_leaves_no_process_and_the_next_one_no_folder(person: Person, place: Path) -> None:
    demo = Demo(person, place)
    demo.until_it_prints(RUNS)
    (folder,) = demo_folders(place)
    pids = demo.below()
    demo.process.kill()
    demo.process.wait(30)
    nothing_is_left(pids, folder)
    # One whose reaper was killed too would leave this.
    abandoned = place / "strata-demo-abandoned"
    abandoned.mkdir(mode=0o700)
    following = Demo(person, place)
    try:
        following.until_it_prints("everything is in ")
        assert not abandoned.exists()
        assert f"removed {abandoned}" in following.printed
    finally:
        following.close()


def test_a_demo_whose_reaper_is_killed_ends_and_leaves_nothing(person: Person, place: Path) -> None:
    demo = Demo(person, place)
    demo.until_it_prints(RUNS)
    (folder,) = demo_folders(place)
    pids = demo.below()
    (reaper,) = psutil.Process(demo.process.pid).children()
    reaper.kill()
    assert demo.process.wait(60) not in (0, -signal.SIGKILL)
    assert "the hub of the demo has ended" in demo.printed
    nothing_is_left(pids, folder)


def test_a_closed_terminal_leaves_nothing(person: Person, place: Path) -> None:
    keyboard, terminal = pty.openpty()
    # Below nohup the tests ignore the signal, and what they start does too.
    ours = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    demo = Demo(person, place, terminal=terminal)
    signal.signal(signal.SIGHUP, ours)
    os.close(terminal)
    demo.until_it_prints(RUNS)
    (folder,) = demo_folders(place)
    pids = demo.below()
    os.close(keyboard)
    assert demo.process.wait(60) == -signal.SIGHUP
    nothing_is_left(pids, folder)
