"""A job's environment is a list of what goes, not of what stays."""

from __future__ import annotations

from pathlib import Path

from strata.fleet.agent.attempt_folder import AttemptPaths
from strata.fleet.agent.environment_variables import JobInputs, job_environment
from strata.fleet.core.job_command import inherited_by_jobs, job_command
from tests.core.fleet_agent.leases import a_trainer, lease

PLACE = AttemptPaths(Path("/w/a"))


def test_only_variables_on_the_list_go_to_a_job() -> None:
    given = {
        "PATH": "/bin",
        "LC_ALL": "C",
        "AWS_SECRET_ACCESS_KEY": "x",
        "STRATA_AGENT_STATE": "/s",
        "STRATA_OPERATOR_TOKEN": "x",
        "HTTP_PROXY": "http://u:p@proxy",
        "NCCL_DEBUG": "INFO",
    }
    assert set(inherited_by_jobs(given)) == {"PATH", "LC_ALL"}
    assert set(inherited_by_jobs(given, ("NCCL_*",))) == {"PATH", "LC_ALL", "NCCL_DEBUG"}


def test_ours_cannot_be_passed_on_even_if_somebody_asks_for_it() -> None:
    assert inherited_by_jobs({"STRATA_AGENT_TOKEN": "x"}, ("STRATA_*",)) == {}


def test_a_trainer_adds_variables_but_cannot_change_ours() -> None:
    trainer = a_trainer(env={"OMP_NUM_THREADS": "4", "STRATA_JOB": "another"})
    given = lease(trainer)
    made = job_environment(given, trainer, PLACE, inherited={"PATH": "/bin"})
    assert made["OMP_NUM_THREADS"] == "4"
    assert made["STRATA_JOB"] == given.job_id
    assert made["STRATA_HYPER"] == "/w/a/hyper.json"
    assert "STRATA_CHECKPOINT_IN" not in made


def test_a_checkpoint_to_resume_from_is_told() -> None:
    made = job_environment(lease(checkpoint="artifact1_" + "0" * 64), a_trainer(), PLACE, inherited={})
    assert made["STRATA_CHECKPOINT_IN"] == "/w/a/resume"


def test_a_virtual_environment_comes_first_in_the_path() -> None:
    made = job_environment(lease(), a_trainer(venv="/v"), PLACE, inherited={"PATH": "/bin"})
    assert made["PATH"] == "/v/bin:/bin"
    assert made["VIRTUAL_ENV"] == "/v"


def test_another_user_gets_his_own_home_and_none_of_the_agents() -> None:
    inherited = {"HOME": "/h/agent", "USER": "agent", "HF_HOME": "/h/agent/hf", "PATH": "/bin"}
    made = job_environment(lease(), a_trainer(), PLACE, inherited=inherited, home="/home/jobs")
    assert made["HOME"] == "/home/jobs"
    assert not [value for value in made.values() if "agent" in value]


def test_cards_are_named_or_hidden() -> None:
    shown = job_environment(lease(), a_trainer(), PLACE, inherited={}, inputs=JobInputs(devices=(1, 3)))
    inherited = {"CUDA_VISIBLE_DEVICES": "0"}
    hidden = job_environment(lease(), a_trainer(), PLACE, inherited=inherited, inputs=JobInputs(devices=()))
    assert shown["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert hidden["CUDA_VISIBLE_DEVICES"] == ""


def test_python_is_the_trainers_interpreter_else_the_hosts() -> None:
    assert job_command(a_trainer("python", "x.py"), "/host/python") == ["/host/python", "x.py"]
    assert job_command(a_trainer("python", "x.py", interpreter="/own/python"), "/host/python") == [
        "/own/python",
        "x.py",
    ]
    assert job_command(a_trainer("python", "x.py", venv="/v"), "/host/python") == ["python", "x.py"]
    assert job_command(a_trainer("./run.sh"), "/host/python") == ["./run.sh"]
