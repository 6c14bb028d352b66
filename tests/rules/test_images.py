"""Containerfile, compose.yaml and deploy/kubernetes agree, keep their secrets apart, and leave the images no powers.

`python -m scripts.images` builds and runs them; here are what needs no podman, and what finds an image's secrets.
"""

from __future__ import annotations

import io
import re
import tarfile
from pathlib import Path
from typing import Any, Final

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml  # type: ignore[import-untyped]

from scripts.images import TARGETS, USER, find_in_metadata, find_problems, image_of
from scripts.install_locked import refuse_unlocked

ROOT: Final = Path(__file__).parents[2]
KUBERNETES: Final = ROOT / "deploy" / "kubernetes"
CONTAINERFILE: Final = (ROOT / "Containerfile").read_text(encoding="utf-8")
COMPOSE: Final[dict[str, Any]] = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
OBJECTS: Final[list[dict[str, Any]]] = [
    each
    for file in sorted(KUBERNETES.glob("*.yaml"))
    for each in yaml.safe_load_all(file.read_text(encoding="utf-8"))
    if file.name != "kustomization.yaml"
]
OURS: Final = {image_of(target) for target in TARGETS}
VERSION: Final = "1.37"


def stages() -> dict[str, str]:
    """Each stage of the Containerfile without comments, and continued lines joined."""
    text = re.sub(r"\\\n\s*", "", re.sub(r"(?m)^#.*\n", "", CONTAINERFILE))
    parts = re.split(r"(?m)^FROM (\S+) AS (\S+)\n", text)
    return {
        name: f"FROM {parent}\n{body}" for parent, name, body in zip(parts[1::3], parts[2::3], parts[3::3], strict=True)
    }


def lines(stage: str, word: str) -> list[str]:
    return re.findall(rf"(?m)^{word} (.*)$", stages()[stage])


def pods() -> list[dict[str, Any]]:
    return [each["spec"]["template"]["spec"] for each in OBJECTS if each["kind"] == "StatefulSet"]


def containers() -> list[dict[str, Any]]:
    return [each for pod in pods() for each in (*pod.get("initContainers", ()), *pod["containers"])]


def problem_with(each: dict[str, Any]) -> str:
    try:
        kubernetes_validate.validate(each, VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        return str(error.message)
    return ""


@pytest.mark.parametrize("target", TARGETS)
def test_the_program_of_an_image_has_no_root(target: str) -> None:
    assert lines(target, "USER") == [USER]


def test_every_image_starts_from_the_base_that_was_named() -> None:
    (base,) = re.findall(r"(?m)^ARG BASE=(\S+)$", CONTAINERFILE)
    assert re.search(r":\d+\.\d+\.\d+-", base), "a tag that moves is another image tomorrow"
    assert {lines(name, "FROM")[0] for name in stages()} <= {"${BASE}", *stages()}


def test_only_the_lock_the_wheel_and_environments_of_it_are_copied() -> None:
    copied = {line for name in stages() for line in lines(name, "COPY")}
    assert copied == {
        "constraints.txt constraints-agent.txt ./",
        "pyproject.toml hatch_build.py ARCHITECTURE.md CHANGELOG.md README.md LICENSE ./",
        "docs docs",
        "src src",
        "scripts/install_locked.py scripts/",
        *(f"--from={target}-packages /opt/strata /opt/strata" for target in TARGETS),
    }
    assert [line for name in stages() for line in lines(name, "ADD")] == []


def test_only_the_training_server_has_a_compiler() -> None:
    assert [name for name, text in stages().items() if re.search(r"\b(g\+\+|gcc|build-essential)", text)] == ["serve"]


def test_packages_are_installed_with_the_settings_of_the_index_as_a_secret() -> None:
    secret = "--mount=type=secret,id=pip.conf,target=/etc/pip.conf "
    runs = [
        line for name in stages() for line in lines(name, "RUN") if "pip install" in line or "install_locked" in line
    ]
    assert len(runs) == 1 + len(TARGETS)
    assert [line for line in runs if not line.startswith(secret)] == []


def test_compose_and_kubernetes_run_these_images() -> None:
    services = COMPOSE["services"]
    built = {each["image"]: each["build"]["target"] for each in services.values() if "build" in each}
    assert built == {image_of(name): name for name in ("hub", "agent", "serve")}
    others = {each["image"] for each in services.values()} - OURS
    assert [image for image in others if not re.search(r":v?\d+\.\d+(\.\d+)?\}?$", image)] == []
    assert {each["image"] for each in containers()} <= OURS
    kustomization = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text(encoding="utf-8"))
    assert {each["name"] for each in kustomization["images"]} == {each["image"] for each in containers()}
    assert {*kustomization["resources"], "kustomization.yaml"} == {file.name for file in KUBERNETES.iterdir()}


def test_no_secret_stands_in_compose_or_kubernetes() -> None:
    """Neither as a variable nor as an argument, but as a file of the folder secrets."""
    for name, service in COMPOSE["services"].items():
        secret = [key for key in service.get("environment", {}) if re.search("PASSWORD|TOKEN|SECRET|KEY", key)]
        assert [key for key in secret if not key.endswith("_FILE")] == [], name
        assert set(service.get("secrets", ())) <= set(COMPOSE["secrets"]), name
    assert [each for each in COMPOSE["secrets"].values() if not each["file"].startswith("secrets/")] == []
    texts = [(ROOT / "compose.yaml").read_text(encoding="utf-8"), *map(str, OBJECTS)]
    assert [text for text in texts if re.search(r"://[^/\s:]+:[^/\s@]+@", text)] == []
    assert "Secret" not in {each["kind"] for each in OBJECTS}


def test_the_root_file_system_is_read_only_and_no_capability_is_left() -> None:
    for name in ("hub", "agent", "serve"):
        service = COMPOSE["services"][name]
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"]), name
    for pod in pods():
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False, "STRATA_HUB_PORT would be taken for a setting"
        assert pod["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
        assert f"{pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}" == USER
    for container in containers():
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"], container["name"]
        assert context["capabilities"] == {"drop": ["ALL"]}, container["name"]
        assert context["allowPrivilegeEscalation"] is False, container["name"]


@pytest.mark.parametrize("each", OBJECTS, ids=lambda each: f"{each['kind']}-{each['metadata']['name']}")
def test_kubernetes_takes_the_object(each: dict[str, Any]) -> None:
    assert problem_with(each) == ""


def test_what_kubernetes_would_not_take_is_found() -> None:
    (hub,) = [each for each in OBJECTS if each["kind"] == "StatefulSet" and each["metadata"]["name"] == "strata-hub"]
    assert "replicaCount" in problem_with(hub | {"spec": {**hub["spec"], "replicaCount": 1}})
    assert "is not of type" in problem_with(hub | {"spec": {**hub["spec"], "replicas": "one"}})


def test_every_selector_finds_pods() -> None:
    labels = [each["spec"]["template"]["metadata"]["labels"] for each in OBJECTS if each["kind"] == "StatefulSet"]
    for each in OBJECTS:
        selector = each["spec"].get("podSelector") or each["spec"]["selector"]
        assert selector.get("matchLabels", selector) in labels, each["metadata"]["name"]


@pytest.mark.parametrize(
    ("path", "content", "problem"),
    [
        ("usr/bin/x86_64-linux-gnu-gcc-12", b"\x7fELF", "a compiler"),
        ("usr/lib/gcc/x86_64-linux-gnu/12/cc1plus", b"\x7fELF", "a compiler"),
        ("var/lib/strata/.netrc", b"machine x", "credentials"),
        ("etc/pip.conf", b"[global]\n", "credentials"),
        ("opt/strata/.env", b"x", "credentials"),
        ("srv/x", b"index-url = https://user:word@index.example/simple", "a private key or a password"),
        ("srv/y", b"-----BEGIN PRIVATE KEY-----\n" + b"MIGHAgEA" * 9, "a private key or a password"),
    ],
)
def test_what_an_image_must_not_have_is_found_in_its_layers(path: str, content: bytes, problem: str) -> None:
    found = list(find_problems(layer_with({path: content}), compiler=False))
    assert [each.partition(":")[0] for each in found] == [problem]


@pytest.mark.parametrize(
    ("metadata", "problems"),
    [
        (b'"Env": ["PIP_INDEX_URL=https://index.example/simple"]', 1),
        (b'"created_by": "pip install -i https://user:word@index.example/simple x"', 1),
        (b'"Env": ["PYTHON_PIP_VERSION=24.0", "STRATA_URL=unix:/var/lib/strata/strata-hub/hub.sock"]', 0),
    ],
)
def test_settings_of_an_index_are_found_in_the_metadata(metadata: bytes, problems: int) -> None:
    assert len(list(find_in_metadata(metadata))) == problems


def test_a_plain_layer_has_no_problem() -> None:
    files = {
        "etc/pip.conf": b"",
        "usr/bin/cache": b"x",
        "usr/share/doc/gcc-12-base/copyright": b"x",
        "usr/bin/last": b"x",
    }
    assert list(find_problems(layer_with(files), compiler=False)) == []
    assert list(find_problems(layer_with({"usr/bin/gcc": b"x"}), compiler=True)) == []


def test_a_package_that_is_not_the_locked_one_is_refused(tmp_path: Path) -> None:
    lock = f"click==8.2 \\\n    --hash=sha256:{'0' * 64}\n    # via strata-train\n"
    click, torch = tmp_path / "click-8.2-py3-none-any.whl", tmp_path / "torch-2.13.0-cp311-none-any.whl"
    for file in (click, torch):
        file.write_bytes(b"other")
    refuse_unlocked([torch], lock, apart=True)
    for files, apart in (([click], True), ([click], False), ([torch], False)):
        with pytest.raises(SystemExit, match="has none of the hashes"):
            refuse_unlocked(files, lock, apart=apart)


def layer_with(files: dict[str, bytes]) -> tarfile.TarFile:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as layer:
        for path, content in files.items():
            member = tarfile.TarInfo(path)
            member.size = len(content)
            layer.addfile(member, io.BytesIO(content))
    buffer.seek(0)
    return tarfile.open(fileobj=buffer)
