"""Which state a server continues with: that of the attempt that has served last, wherever it is, or the last copy."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from strata.fleet.agent.attempt_folder import AttemptPaths
from strata.fleet.agent.server_job import StateSource, data_folder, prepare_server, seal_state
from strata.fleet.core.jobspec import JobSpec
from strata.fleet.wire.leases import LeaseGiven

JOB = "job1_" + "a" * 64
COPY = "artifact1_" + "b" * 64
FROM_COPY = "this server continues on another host from a copy of noon: what is newer is lost"


def lease(epoch: int, *, served: int = 0, copy: str = "") -> LeaseGiven:
    spec = JobSpec(model="m", kind="server", trainer="t")
    return LeaseGiven(
        job_id=JOB, epoch=epoch, expires_in_s=45.0, spec=spec, checkpoint=copy, served_epoch=served, front_key="k"
    )


class Hosts:
    """The work folders of hosts, and the one copy that the hub has."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._copy = b""
        self._attempts = 0

    def start(self, host: str, given: LeaseGiven) -> str:
        """Prepare an attempt: what it learns that was lost."""
        self._attempts += 1
        paths = AttemptPaths(self._folder / "attempts" / str(self._attempts))
        paths.folder.mkdir(parents=True)
        (self._folder / host).mkdir(exist_ok=True)
        source = StateSource(lambda _: [self._copy], lambda _: "noon")
        return prepare_server(given, paths, self._folder / host, None, source).get("STRATA_SERVER_LOST", "")

    def data(self, host: str) -> Path:
        return data_folder(self._folder / host, JOB)

    def work(self, host: str, text: str) -> None:
        (self.data(host) / "work").write_text(text)
        (self.data(host) / "work").chmod(0o600)

    def found(self, host: str) -> str:
        return (self.data(host) / "work").read_text()

    def save(self, host: str) -> None:
        written = io.BytesIO()
        with tarfile.open(fileobj=written, mode="w") as tar:
            tar.add(self.data(host), arcname=".")
        self._copy = written.getvalue()

    def end(self, host: str, given: LeaseGiven) -> None:
        """In order: the agent saves what the process left."""
        assert seal_state(given, self._folder / host, None)
        self.save(host)


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    found = Hosts(tmp_path)
    assert found.start("a", lease(1)) == ""
    found.work("a", "one")
    return found


def test_a_server_that_starts_again_on_its_host_has_everything(hosts: Hosts) -> None:
    hosts.save("a")
    hosts.work("a", "two")
    (hosts.data("a") / "copies" / "old").mkdir(parents=True)
    assert (hosts.start("a", lease(2, served=1, copy=COPY)), hosts.found("a")) == ("", "two")
    assert not (hosts.data("a") / "copies").exists(), "it may have the name of the next one"


def test_a_server_that_ended_in_order_has_everything_on_another_host(hosts: Hosts) -> None:
    hosts.end("a", lease(1))
    assert (hosts.start("b", lease(2, served=1, copy=COPY)), hosts.found("b")) == ("", "one")
    assert (hosts.data("b") / "work").stat().st_mode & 0o777 == 0o600


def test_a_server_whose_host_was_lost_knows_that_it_has_a_copy_for_ever(hosts: Hosts) -> None:
    hosts.save("a")
    hosts.work("a", "two")
    assert (hosts.start("b", lease(2, served=1, copy=COPY)), hosts.found("b")) == (FROM_COPY, "one")
    assert hosts.start("b", lease(2, served=1, copy=COPY)) == FROM_COPY, "the agent died and prepares it again"
    assert hosts.start("b", lease(3, served=2, copy=COPY)) == FROM_COPY


def test_what_a_host_has_is_stale_once_another_one_has_served(hosts: Hosts) -> None:
    hosts.end("a", lease(1))
    hosts.start("b", lease(2, served=1, copy=COPY))
    hosts.work("b", "two")
    hosts.end("b", lease(2, served=1, copy=COPY))
    assert (hosts.start("a", lease(3, served=2, copy=COPY)), hosts.found("a")) == ("", "two")


def test_an_attempt_that_never_served_loses_nobodys_work(hosts: Hosts) -> None:
    hosts.save("a")
    hosts.work("a", "two")
    assert hosts.start("b", lease(2, served=1, copy=COPY)) == FROM_COPY
    assert (hosts.start("a", lease(3, served=1, copy=COPY)), hosts.found("a")) == ("", "two")


def test_without_a_copy_all_is_lost_and_the_server_says_so(hosts: Hosts) -> None:
    lost = hosts.start("b", lease(2, served=1))
    assert lost == "this server continues on another host without a copy: what it had is lost"
    assert [each.name for each in hosts.data("b").iterdir()] == ["fleet.json"]
