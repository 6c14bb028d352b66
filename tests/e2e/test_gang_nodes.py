"""Gangs of two hosts with two ranks each, which meet through the coordinator.

One host dies or is cut off in mid-epoch, the other goes on from the committed checkpoint, and when the host is back the
gang grows.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import psutil  # type: ignore[import-untyped]
import pytest

from examples.elastic_sft.check import Run, judge, lines, survivors
from examples.elastic_sft.corpus import write_corpus
from strata.base.atomic import write_file
from strata.base.settings import process_environment
from tests.e2e.nodes import Machine, network
from tests.shell.coord.test_access import certificate, tls_files
from tests.shell.fleet_agent.waiting import eventually
from tests.support.kernel import lets_make_networks
from tests.support.ports import port_of, reserve_port

NEEDS: Final = ("root", "ip", "nft")
PROGRAM: Final = Path(__file__).with_name("gated_sft.py")
STRATA: Final = str(Path(sys.executable).with_name("strata"))
TORCHRUN: Final = str(Path(sys.executable).with_name("torchrun"))
JOB: Final = "gang"
EPOCHS: Final = 2
SAMPLES: Final = 128
EVERY: Final = 4
"""Steps between two checkpoints."""
WITHIN_S: Final = 600
FAILED, UNFINISHED = 100, 101

pytestmark = pytest.mark.timeout(WITHIN_S + 20)
Line = dict[str, Any]


class Host:
    """A launcher of workers and these, which die together."""

    def __init__(self, folder: Path, ip: str, launcher: Sequence[str], **variables: str) -> None:
        self.name = f"host {ip}"
        self.log = folder / f"{ip}.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(*launcher, "--local-addr", ip),
                    *(PROGRAM, "--corpus", folder / "corpus.jsonl", "--out", folder),
                    *("--epochs", str(EPOCHS), "--checkpoint-every", str(EVERY)),
                ],
                env={**process_environment(), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **variables},
                stdout=log,
                stderr=log,
            )

    @property
    def ranks(self) -> set[int]:
        below = psutil.Process(self.process.pid).children(recursive=True)
        return {int(each.environ()["RANK"]) for each in below if str(PROGRAM) in each.cmdline()[1:3]}

    def die(self) -> None:
        """As when the power fails: nobody gets to say a word."""
        try:
            found = [psutil.Process(self.process.pid)]
            found += found[0].children(recursive=True)
        except psutil.NoSuchProcess:
            return
        for each in found:
            each.suspend()
        for each in found:
            each.kill()
        self.process.wait()


class Log:
    """What the ranks write, and the gate that holds them at a step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def hold_at(self, step: int) -> None:
        write_file(self.folder / "gate", str(step).encode())

    def let_go(self) -> None:
        (self.folder / "gate").unlink()

    def check(self) -> None:
        """Called while waiting."""

    def wait(self, condition: Callable[[list[Line]], bool], what: str) -> list[Line]:
        until_s = time.monotonic() + WITHIN_S / 3
        while not condition(said := lines(self.folder, "rank-*.jsonl")):
            self.check()
            assert time.monotonic() < until_s, f"not in time: {what}; {said[-4:]}"
            time.sleep(0.05)
        return said

    def started(self, world_size: int, after: int = 0) -> int:
        """Wait until all ranks have begun in one generation, later than `after`: that generation."""

        def newest(said: list[Line]) -> tuple[int, set[int]]:
            found = [each for each in said if each["event"] == "started" and each["world_size"] == world_size]
            last = max((each["generation"] for each in found), default=0)
            return last, {each["rank"] for each in found if each["generation"] == last}

        what = f"{world_size} ranks in a generation after {after}"
        said = self.wait(lambda said: newest(said)[0] > after and newest(said)[1] == {*range(world_size)}, what)
        return newest(said)[0]

    def began(self, generation: int) -> int:
        """The step from which a generation has started."""
        said = lines(self.folder, "rank-*.jsonl")
        (step,) = {each["step"] for each in said if (each["event"], each["generation"]) == ("started", generation)}
        return int(step)

    def trained(self, generation: int, step: int, world_size: int) -> None:
        """Wait until all ranks of a generation have done a step."""

        def at(said: list[Line]) -> int:
            done = [each for each in said if each["event"] == "step" and each["step"] == step]
            return len([each for each in done if each["generation"] == generation])

        self.wait(lambda said: at(said) == world_size, f"step {step} of generation {generation}")

    def is_right(self, generations: Sequence[int]) -> None:
        """Every sample once per epoch, and these generations started from nothing and from the two checkpoints."""
        run = Run.read(self.folder)
        assert judge(run, epochs=EPOCHS, loss_below=5.0).problems == []
        starts = {line["generation"]: line["step"] for line in run.log if line["event"] == "started"}
        assert [starts[each] for each in generations] == [0, EVERY, 2 * EVERY]


class Site(Log):
    def __init__(self, folder: Path, port: int) -> None:
        super().__init__(folder)
        self.address = f"127.0.0.1:{port}"
        self.hosts: list[Host] = []
        command = [STRATA, "coordinator", "--listen", self.address]
        with (folder / "coordinator.log").open("wb") as log:
            self.coordinator = subprocess.Popen(
                [*command, "--database", f"sqlite:{folder / 'coordinator.db'}"],
                env={**process_environment(), "STRATA_COORDINATOR_JOB_HEARTBEAT_INTERVAL_S": "2"},
                stdout=log,
                stderr=log,
            )

    def start(self, ip: str) -> Host:
        """Two workers under torchrun."""
        torchrun = (
            *(TORCHRUN, "--nnodes", "1:2", "--nproc-per-node", "2", "--max-restarts", "20"),
            *("--rdzv-backend", "strata", "--rdzv-endpoint", self.address, "--rdzv-id", JOB),
            *("--rdzv-conf", "last_call_timeout=30", "--monitor-interval", "0.2"),
        )
        return self._start(ip, torchrun)

    def run(self, ip: str, workers: int, *options: str, **variables: str) -> Host:
        """Under `strata gang run`."""
        command = (STRATA, "gang", "run", "--nproc", str(workers), "--coordinator", self.address, *options)
        return self._start(ip, (*command, "--job", JOB, "--data", str(self.folder / f"data-{ip}")), **variables)

    def _start(self, ip: str, launcher: Sequence[str], **variables: str) -> Host:
        self.hosts.append(Host(self.folder, ip, launcher, **variables))
        return self.hosts[-1]

    def drain(self, rank: int) -> None:
        """While the gate holds the ranks, so that they are not at their end before; it opens then."""
        drain = [STRATA, "gang", "drain", JOB, f"rank-{rank}", "--address", self.address, "--wait", "0"]
        assert subprocess.run(drain, check=False).returncode == UNFINISHED
        self.let_go()

    def check(self) -> None:
        for host in self.hosts:
            assert host.process.poll() in (None, 0, -9), f"{host.name} ended: {host.log.read_text('utf-8')[-3000:]}"

    def show(self, job: str) -> Any:
        command = [STRATA, "gang", "show", job, "--address", self.address, "-o", "json"]
        return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)

    def close(self) -> None:
        for host in self.hosts:
            host.die()
            print(host.name, host.log.read_text("utf-8")[-3000:])
        self.coordinator.terminate()
        self.coordinator.wait(20)


@contextmanager
def site(folder: Path) -> Iterator[Site]:
    with reserve_port() as guard:
        found = Site(folder, port_of(guard))
        try:
            yield found
        finally:
            found.close()


def test_a_gang_over_two_hosts_shrinks_when_one_dies_and_grows_when_it_is_back(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus.jsonl", SAMPLES)
    with site(tmp_path) as gang:
        gang.hold_at(EVERY + 2)
        gang.start("127.0.0.1")
        second = gang.start("127.0.0.2")
        both = gang.started(world_size=4)
        gang.trained(both, EVERY + 2, world_size=4)
        nodes = gang.show(f"{JOB}/nodes")["workers"]
        assert {each["ip"] for each in nodes} == {"127.0.0.1", "127.0.0.2"}
        assert all(each["port"] for each in nodes)
        ranks = {each["worker_id"]: each["rank"] for each in gang.show(JOB)["workers"]}
        assert ranks == {f"rank-{rank}": rank for rank in range(4)}

        second.die()
        alone = gang.started(world_size=2, after=both)
        gang.hold_at(2 * EVERY + 1)
        gang.trained(alone, 2 * EVERY + 1, world_size=2)

        returned = gang.start("127.0.0.2")
        again = gang.started(world_size=4, after=alone)
        gang.hold_at(2 * EVERY + 2)
        gang.trained(again, 2 * EVERY + 2, world_size=4)
        gang.let_go()
        for host in (gang.hosts[0], returned):
            assert host.process.wait(WITHIN_S / 3) == 0, host.log.read_text("utf-8")[-3000:]

    gang.is_right((both, alone, again))


def test_a_gang_goes_on_without_drained_ranks_and_loses_no_step(tmp_path: Path) -> None:
    """Of a host with two ranks one is drained, then the only one of the other host."""
    write_corpus(tmp_path / "corpus.jsonl", SAMPLES)
    with site(tmp_path) as gang:
        gang.hold_at(0)
        first, second = (gang.run(f"127.0.0.{n}", 3 - n, "--nnodes", "1:2") for n in (1, 2))
        three = gang.started(world_size=3)
        gang.hold_at(EVERY + 1)
        gang.trained(three, EVERY + 1, world_size=3)
        gang.drain(max(first.ranks))
        two = gang.started(world_size=2, after=three)
        assert (len(first.ranks), len(second.ranks)) == (1, 1)
        began = gang.began(two)
        gang.hold_at(began + 3)
        gang.trained(two, began + 3, world_size=2)
        gang.drain(*second.ranks)
        one = gang.started(world_size=1, after=two)
        assert [host.process.wait(WITHIN_S / 3) for host in (first, second)] == [0, 0]
        assert "drained workers of this host: 1; it goes on with 1" in first.log.read_text("utf-8")
        assert "drained workers of this host: 1; it goes on with 0" in second.log.read_text("utf-8")
    run = Run.read(tmp_path)
    assert judge(run, epochs=EPOCHS, loss_below=5.0).problems == []
    # Before the host of a drained rank is back, the other one may begin alone, and goes back with it to the checkpoint.
    kept = survivors(run.log)
    for generation in (three, two, one):
        steps = [line for line in run.log if (line["event"], line["generation"]) == ("step", generation)]
        assert steps
        assert all(line in kept for line in steps), "no step before a drain is lost"


BROKEN: Final = {
    "product is wrong": "lambda left, right: mm(left, right) + 1",
    "product takes": "lambda left, right: [mm(left, right) for _ in range(40)][0]",
}


@pytest.mark.parametrize("reason", BROKEN)
def test_a_host_that_computes_wrongly_or_slowly_is_excluded_before_the_others_train(
    tmp_path: Path, reason: str
) -> None:
    write_corpus(tmp_path / "corpus.jsonl", SAMPLES)
    (tmp_path / "broken").mkdir()
    broken = f"import torch\nmm = torch.mm\ntorch.mm = {BROKEN[reason]}\n"
    (tmp_path / "broken" / "sitecustomize.py").write_text(broken, encoding="utf-8")
    with site(tmp_path) as gang:
        gang.hold_at(0)
        options = ("--nnodes", "2:3", "--check-hosts", "4")
        well = [gang.run(f"127.0.0.{n}", 1, *options) for n in (1, 2)]
        bad = gang.run("127.0.0.3", 1, *options, PYTHONPATH=str(tmp_path / "broken"))
        assert bad.process.wait(WITHIN_S / 2) == FAILED
        assert re.search(rf"\(127\.0\.0\.3\), this host, was excluded: its matrix {reason}", bad.log.read_text("utf-8"))
        gang.let_go()
        assert [host.process.wait(WITHIN_S / 2) for host in well] == [0, 0]
        assert all("(127.0.0.3) was excluded" in host.log.read_text("utf-8") for host in well)
    run = Run.read(tmp_path)
    assert judge(run, epochs=EPOCHS, loss_below=5.0).problems == []
    assert {line["world_size"] for line in run.log if line["event"] == "started"} == {2}


CUT: Final = """
table inet cut {
  chain input { type filter hook input priority 0; policy drop; iif "lo" accept; }
  chain output { type filter hook output priority 0; policy drop; oif "lo" accept; }
}
"""
COORDINATOR, FIRST, SECOND = "10.0.0.9", "10.0.0.1", "10.0.0.2"
ADDRESS: Final = f"{COORDINATOR}:7070"


WITH_NETWORKS: Final = pytest.mark.skipif(
    not lets_make_networks(), reason="the kernel lets this process make no network namespaces"
)


@contextmanager
def guarded_coordinator(folder: Path, **settings: str) -> Iterator[tuple[Machine, list[Machine]]]:
    """A coordinator with TLS and tokens on a machine of its own, and two hosts whose workers know both."""
    (folder / "cut.nft").write_text(CUT, encoding="utf-8")
    authority = certificate("authority")
    tls_files(folder, certificate("coordinator", authority, COORDINATOR))
    (folder / "ca.pem").write_bytes(authority.pem)
    write_file(folder / "token.secret", b"s" * 32, mode=0o600)
    with network(COORDINATOR, FIRST, SECOND) as (head, *hosts):
        head.environ |= {"STRATA_COORDINATOR_TOKEN_SECRET_FILE": str(folder / "token.secret"), **settings}
        token = head.run(f"strata coordinator token --job {JOB}", folder)
        write_file(folder / "worker.token", token.encode(), mode=0o600)
        serving = "--tls-certificate server.pem --tls-key server.key --database sqlite:coordinator.db"
        coordinator = head.start(f"strata coordinator --listen {ADDRESS} {serving}", folder, folder / "coordinator.log")
        coordinator.until_it_says(":7070")
        for host in hosts:
            host.environ |= {
                "STRATA_WORKER_TOKEN_FILE": str(folder / "worker.token"),
                "STRATA_WORKER_TLS_CA": str(folder / "ca.pem"),
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "eth0",
            }
        try:
            yield head, hosts
        finally:
            print(coordinator.said()[-4000:])


@WITH_NETWORKS
def test_what_a_host_writes_after_it_was_left_behind_is_refused(tmp_path: Path) -> None:
    program = f"{sys.executable} {Path(__file__).with_name('stale_worker.py')}"
    settings = {"STRATA_COORDINATOR_JOB_HEARTBEAT_INTERVAL_S": "2", "STRATA_COORDINATOR_PING_TIMEOUT_S": "2"}
    with guarded_coordinator(tmp_path, **settings) as (head, hosts):
        running = [
            host.start(f"{program} {role} {tmp_path} {ADDRESS}", tmp_path, tmp_path / f"{role}.log")
            for host, role in zip(hosts, ("steady", "stale"), strict=True)
        ]
        try:
            held = written(tmp_path / "held.json")
            hosts[1].run("nft -f cut.nft", tmp_path)
            (tmp_path / "cut").touch()
            assert written(tmp_path / "committed.json") > held["generation"], "the other one goes on, in mid-epoch"
            hosts[1].run("nft delete table inet cut", tmp_path)
            (tmp_path / "return").touch()
            refusals = written(tmp_path / "refusals.json")
            assert [each.end() for each in running] == [0, 0]
            head.environ |= {
                "STRATA_GANG_TLS_CA": str(tmp_path / "ca.pem"),
                "STRATA_GANG_TOKEN_FILE": str(tmp_path / "worker.token"),
            }
            job = json.loads(head.run(f"strata gang show {JOB} --address {ADDRESS} -o json", tmp_path))
        finally:
            for each in running:
                print(each.said()[-4000:])
    writes = ("heartbeat", "shard", "checkpoint")
    assert refusals["evicted"] == {key: ["NOT_FOUND", "evicted"] for key in writes}
    assert refusals["replaced"] == {key: ["FAILED_PRECONDITION", "stale-incarnation"] for key in writes}
    over = ["FAILED_PRECONDITION", "stale-generation"]
    assert refusals["old generation"] == {"heartbeat": ["OK", ""], "shard": over, "checkpoint": over}
    assert refusals["rejected"] == [held["lease"]]
    assert sorted(written(tmp_path / "model.json")) == [*range(20)], "nothing is missing, nothing doubled"
    assert [each["finished_epochs"] for each in job["datasets"]] == [[0]]
    parts = [part["uri"] for each in job["checkpoints"] for part in each["manifest"]["parts"]]
    assert [Path(uri).name.partition("-")[0] for uri in parts] == ["part"] * len(parts), "none of them came late"


def written(file: Path) -> Any:
    eventually(file.exists, WITHIN_S / 3)
    return json.loads(file.read_text("utf-8"))
