"""Probing and the self-test on the machine at hand; cards by a program that prints what nvidia-smi does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from strata.cli.agent import agent
from strata.fleet.agent import gpu
from strata.fleet.agent.attempt_folder import find_job_user
from strata.fleet.agent.prepare import create_work_folder
from strata.fleet.agent.probe import CpuMeter, commit_of, hostname, probe_host, query_interpreter, sample_host
from strata.fleet.agent.sandbox import HostSandbox, detect_sandbox
from strata.fleet.agent.selftest import check_disk_space, check_gpus, run_self_test
from strata.fleet.agent.settings import AgentSettings, SandboxSettings
from strata.fleet.agent.start import check_host

NEEDS = ("bwrap",)
PLAIN = AgentSettings(interpreter="/usr/bin/python3")
PRINTS = """#!/bin/sh
case "$1" in
  --query-gpu*) echo "0, GPU-8f2c1d3e, NVIDIA GeForce RTX 4090, 24564, 37, 1024, 61, 212.50" ;;
  --query-compute-apps*) echo 4711; echo "[N/A]" ;;
  *) echo "| NVIDIA-SMI 550.54   Driver Version: 550.54   CUDA Version: 12.4 |" ;;
esac
"""


def a_program(folder: Path, name: str, text: str) -> dict[str, str]:
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


def test_this_machine_is_described() -> None:
    found = probe_host({"PATH": "/usr/bin:/bin"}, msgspec.structs.replace(PLAIN, labels={"a": "b"}, slots=3)).capability
    assert found.hostname == hostname()
    assert found.os == "linux"
    assert 1 <= found.cores <= (os.cpu_count() or 1)
    assert found.ram_bytes > 1 << 28
    assert (found.labels, found.slots) == ({"a": "b"}, 3)
    assert (found.gpus, found.cuda) == ((), "")


def test_the_interpreter_is_asked_for_torch_in_a_process_of_its_own() -> None:
    # Another test of this process may have imported it; asking must not.
    here = "torch" in sys.modules
    told = query_interpreter(sys.executable, {"PATH": "/usr/bin"}, with_cuda=False)
    assert told.torch.partition("+")[0] == version("torch").partition("+")[0]
    assert ("torch" in sys.modules) == here


def test_an_interpreter_that_cannot_be_asked_is_said_and_not_raised() -> None:
    for wrong in ("/no/such/python", "/bin/false"):
        assert wrong in query_interpreter(wrong, {}, with_cuda=False).problem


def test_cards_and_their_users_are_found(tmp_path: Path) -> None:
    environ = a_program(tmp_path, "nvidia-smi", PRINTS)
    seen = gpu.query_gpus(environ)
    assert [card.name for card in seen.gpus] == ["NVIDIA GeForce RTX 4090"]
    assert seen.driver_cuda == "12.4"
    assert gpu.compute_pids(environ) == {4711}
    probed = probe_host(environ, PLAIN)
    assert probed.capability.cuda == "", "no torch in that interpreter: the driver's word is not enough"
    assert [each.ok for each in check_gpus(probed)] == [False]
    assert "no torch" in probed.unproven


def test_a_host_whose_torch_computes_on_too_few_cards_offers_no_cuda(tmp_path: Path) -> None:
    """The torch of this environment is real and sees no card, while the driver's program names one."""
    environ = a_program(tmp_path, "nvidia-smi", PRINTS)
    probed = probe_host(environ, AgentSettings(interpreter=sys.executable))
    assert len(probed.capability.gpus) == 1
    assert probed.capability.cuda == ""
    assert "computes on 0 of 1 cards" in probed.unproven


def test_a_broken_driver_is_a_problem_and_no_card(tmp_path: Path) -> None:
    environ = a_program(tmp_path, "nvidia-smi", "#!/bin/sh\necho 'Failed to initialize NVML'\nexit 9\n")
    found = probe_host(environ, PLAIN)
    assert found.capability.gpus == ()
    assert any("Failed to initialize NVML" in problem for problem in found.problems)


def test_the_commit_of_a_checkout_is_told_and_whether_it_was_changed(tmp_path: Path) -> None:
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    (tmp_path / "file").write_text("1")
    for args in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *args], check=True, env=environ)
    commit = commit_of(tmp_path, environ)
    assert len(commit) == 40
    (tmp_path / "file").write_text("2")
    assert commit_of(tmp_path, environ) == f"{commit}-dirty"
    assert commit_of(tmp_path / "nothing", environ) == ""


def test_a_fit_host_passes_every_test(tmp_path: Path) -> None:
    state, work = tmp_path / "state", tmp_path / "work"
    for folder in (state, work):
        folder.mkdir()
    found = run_self_test(AgentSettings(state=state, work=work, min_free_gib=0), {}, ahead_s=1.0)
    assert [finding.check for finding in found] == [
        "state folder", "work folder", "disk space", "child process", "sandbox", "clock",
    ]  # fmt: skip
    assert all(finding.ok for finding in found), found
    assert list(state.iterdir()) == list(work.iterdir()) == []


def test_what_a_host_cannot_do_is_said_in_words(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    gone = AgentSettings(state=state, work=tmp_path / "gone", min_free_gib=0)
    found = {each.check: each for each in run_self_test(gone, {})}
    assert not found["work folder"].ok
    assert not found["child process"].ok
    full = check_disk_space(tmp_path, 1e9)
    assert not full.ok
    assert "min_free_gib" in full.reason


def test_an_interpreter_is_found_by_name_where_jobs_find_it(tmp_path: Path) -> None:
    programs, state, work = (tmp_path / name for name in ("programs", "state", "work"))
    for folder in (programs, state, work):
        folder.mkdir()
    environ = a_program(programs, "python-of-jobs", '#!/bin/sh\nexec /usr/bin/python3 "$@"\n')
    settings = AgentSettings(state=state, work=work, interpreter="python-of-jobs", min_free_gib=0)
    found, missed = (
        {each.check: each for each in run_self_test(settings, variables)}["child process"]
        for variables in (environ, {"PATH": "/usr/bin:/bin"})
    )
    assert found.ok, found.reason
    assert not missed.ok
    assert "python-of-jobs does not run as jobs do" in missed.reason


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_work_folder_that_the_jobs_user_cannot_enter_is_found(tmp_path: Path) -> None:
    state, work = tmp_path / "state", tmp_path / "closed" / "work"
    state.mkdir()
    work.mkdir(parents=True)
    work.parent.chmod(0o700)
    user = HostSandbox(level="user", job_user=find_job_user("nobody"))
    settings = AgentSettings(state=state, work=work, min_free_gib=0)
    found = {each.check: each for each in run_self_test(settings, {}, sandbox=user)}
    assert not found["child process"].ok
    assert "the jobs' user cannot enter" in found["child process"].reason


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("level", ["user", "namespaces"])
def test_an_interpreter_that_the_jobs_user_cannot_reach_is_found(level: str) -> None:
    folder = Path(tempfile.mkdtemp(prefix="strata-probe-"))
    folder.chmod(0o711)
    try:
        interpreter = folder / "closed" / "bin" / "python"
        interpreter.parent.mkdir(parents=True)
        interpreter.symlink_to("/usr/bin/python3")
        interpreter.parents[1].chmod(0o700)
        sandbox = SandboxSettings(mode="required") if level == "namespaces" else SandboxSettings()
        settings = AgentSettings(
            state=folder / "state",
            work=folder / "work",
            interpreter=str(interpreter),
            run_as="nobody",
            sandbox=sandbox,
            min_free_gib=0,
        )
        create_work_folder(settings)
        confined = HostSandbox(level="user", job_user=find_job_user("nobody"))
        if level == "namespaces":
            confined = detect_sandbox(settings, {}, 1 << 30)
        child = {each.check: each for each in check_host(settings, None, confined, {})}["child process"]
        assert not child.ok
        assert f"{interpreter} does not run as jobs do" in child.reason
        assert "can the jobs' user (uid 65534) reach it?" in child.reason
        interpreter.parents[1].chmod(0o755)
        assert all(each.ok for each in check_host(settings, None, confined, {}))
        named, allowed = msgspec.structs.replace(settings, interpreter="python"), {"PATH": str(interpreter.parent)}
        assert all(each.ok for each in check_host(named, None, confined, allowed))
    finally:
        shutil.rmtree(folder)


def test_options_before_a_subcommand_of_the_agent_count_for_it(tmp_path: Path) -> None:
    config = tmp_path / "agent.toml"
    config.write_text(f'[agent]\nstate = "{tmp_path / "state"}"\nmin_free_gib = 0\nsandbox.mode = "off"\n')
    for words in (["--config", str(config), "check"], ["check", "--config", str(config)]):
        done = CliRunner().invoke(agent, words)
        assert done.exit_code == 0, done.output
        assert f"ok   state folder: {tmp_path / 'state'}" in done.output
    other = CliRunner().invoke(agent, ["--state", str(tmp_path / "a"), "check", "--config", str(config)])
    assert f"ok   state folder: {tmp_path / 'a'}" in other.output


def test_the_probe_tells_the_version_of_the_agent_that_is_installed(tmp_path: Path) -> None:
    words = ["--state", str(tmp_path / "state"), "probe", "--interpreter", "/usr/bin/python3"]
    done = CliRunner().invoke(agent, words)
    assert done.exit_code == 0, done.output
    report = msgspec.json.decode(done.stdout)
    assert (report["agent_version"], report["git_commit"]) == (version("strata-train"), "")


def test_what_this_machine_does_is_sampled(tmp_path: Path) -> None:
    sample = sample_host(a_program(tmp_path, "nvidia-smi", PRINTS), CpuMeter(), with_cards=True)
    assert (sample.ram_used_gib or 0) > 0
    assert [(card.card, card.use, card.power_w) for card in sample.cards] == [("GPU-8f2c1d3e", 0.37, 212.5)]
    assert sample_host({"PATH": "/usr/bin"}, CpuMeter(), with_cards=False).cards == ()


def test_the_use_of_the_processors_is_a_share_of_the_time_and_not_the_load(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 0 100 700 100 0 0 0 50 0\ncpu0 1 2 3\n")
    meter = CpuMeter(stat)
    assert meter.use() is None, "no time has passed"
    # Of 400 more ticks the processors computed 300; waiting for a disk is no use of them.
    stat.write_text("cpu  250 10 200 780 120 20 20 0 90 0\ncpu0 1 2 3\n")
    assert meter.use() == 0.75
    stat.write_text("cpu  350 10 200 780 120 20 20 0 90 0\n")
    assert meter.use() == 1.0
    assert CpuMeter(tmp_path / "nothing").use() is None
