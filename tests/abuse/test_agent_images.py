"""What a trainer with an image may try on its host: folders of the host, other users, images from elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from strata.base.errors import Code, StrataError
from strata.fleet.agent.attempt_folder import AttemptPaths
from strata.fleet.agent.hub_api import HubApi
from strata.fleet.agent.prepare import HostContext, create_work_folder, prepare_attempt
from strata.fleet.agent.settings import AgentSettings
from strata.fleet.client import HubClient
from strata.fleet.core.jobspec import EnvironmentSpec, TrainerSpec, check_trainer
from tests.core.fleet_agent.leases import a_trainer, lease

AREA = "agent: images"
IMAGE = EnvironmentSpec(image="docker.io/library/python:3.12")


def a_host(tmp_path: Path) -> HostContext:
    """A host with a podman that has every image."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "podman").write_text("#!/bin/sh\nexit 0\n")
    (programs / "podman").chmod(0o755)
    settings = AgentSettings(state=tmp_path / "state", work=tmp_path / "work")
    create_work_folder(settings)
    return HostContext(settings, HubApi(HubClient("http://127.0.0.1:1")), {"PATH": f"{programs}:/bin"}, None)


def prepare(host: HostContext, trainer: TrainerSpec) -> None:
    prepare_attempt(host, lease(trainer), AttemptPaths(host.attempts / "a"), None)


@pytest.mark.attack(AREA, "have the container runtime mount any folder of the host by naming it as the source")
def test_an_image_comes_with_no_folder_of_the_host(tmp_path: Path, tries: Callable[[int], None]) -> None:
    host = a_host(tmp_path)
    for folder in ("/", "/etc", str(host.settings.state_folder), "etc", "../"):
        trainer = a_trainer("cat", directory=folder, environment=IMAGE)
        with pytest.raises(StrataError, match="exclude each other") as refused:
            check_trainer(trainer)
        assert refused.value.code is Code.INVALID
        # The hub may have stored it before it refused this.
        with pytest.raises(StrataError, match="exclude each other") as refused:
            prepare(host, trainer)
        assert refused.value.code is Code.PRECONDITION
        tries(2)
