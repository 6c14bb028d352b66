"""What a trainer with an image may try on its host: folders of the host, other users, images from elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from strata.base.errors import Code, StrataError
from strata.fleet.agent.attempt_folder import AttemptPaths
from strata.fleet.agent.containers import registry_reference
from strata.fleet.agent.prepare import HostContext, create_work_folder, prepare_attempt
from strata.fleet.agent.settings import AgentSettings
from strata.fleet.client.hub_api import HubApi
from strata.fleet.client.hub_client import HubClient
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


PLACES = (
    "dir:/etc",
    "dir:80/etc",
    "dir:latest",
    "oci:layout",
    "oci-archive:/tmp/image.tar",
    "docker-archive:image.tar",
    "docker-daemon:python:3.12",
    "containers-storage:python",
    "docker://docker.io/library/python",
    "a/../../b",
    "docker.io//python",
    "docker.io/library/python@sha256:0",
)


@pytest.mark.attack(AREA, "run what lies on the host as an image, by a transport of the container runtime")
def test_an_image_is_a_name_in_a_registry(tmp_path: Path, tries: Callable[[int], None]) -> None:
    host = a_host(tmp_path)
    for image in PLACES:
        trainer = a_trainer("cat", bundle="0" * 64, environment=EnvironmentSpec(image=image))
        with pytest.raises(StrataError, match="not the name of an image in a registry"):
            check_trainer(trainer)
        with pytest.raises(StrataError, match="not the name of an image in a registry"):
            prepare(host, trainer)
        tries(2)
    digest = "sha256:" + "0" * 64
    for image in (
        "python",
        "python:3.12",
        "a/b__c-d.e",
        "ghcr.io/a/b",
        "quay.io:443/a/b:1.0",
        f"nvcr.io/a/b:1@{digest}",
    ):
        check_trainer(a_trainer("cat", bundle="0" * 64, environment=EnvironmentSpec(image=image)))


@pytest.mark.attack(AREA, "have the host fetch from a service of its own network by naming it as a registry")
def test_a_host_pulls_from_public_names_or_from_its_own_list(tries: Callable[[int], None]) -> None:
    hosts = ("127.0.0.1:5000", "169.254.169.254", "10.0.0.1:80", "127.1:80", "0x7f.0x1", "localhost", "localhost:5000")
    for host in (*hosts, "registry:5000", "a.localhost", "metadata.google.internal", "printer.local"):
        with pytest.raises(StrataError, match=f"pulls no images from {host}"):
            registry_reference(f"{host}/a/b:1", ())
        assert registry_reference(f"{host}/a/b:1", (host,)) == f"{host}/a/b:1"
        tries(1)
    with pytest.raises(StrataError, match="pulls no images from docker"):
        registry_reference("python:3.12", ("ghcr.io",))
    assert registry_reference("python:3.12", ()) == "docker.io/library/python:3.12"
    assert registry_reference("a/b", ()) == "docker.io/a/b"
    assert registry_reference("ghcr.io/a/b", ()) == "ghcr.io/a/b"
