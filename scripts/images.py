"""Builds, scans and runs the container images: `.venv/bin/python -m scripts.images [--only STEP ...]`.

`build` makes the images of the Containerfile, `scan` looks into every layer of them and starts their program, `run`
lets a hub and an agent run a job; all start without capabilities and with a read-only root file system. Any failed line
makes the exit status 1. It needs podman and catatonit. `--base` is another base image; an option of `podman build` goes
behind `--build-option=`. Options of podman itself are in the files that its variables CONTAINERS_CONF and
CONTAINERS_STORAGE_CONF name.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from scripts.release import ReleaseError, run

STEPS: Final = ("build", "scan", "run")
TARGETS: Final = ("hub", "coordinator", "agent", "serve")
USER: Final = "10001:10001"
CONFINED: Final = ("--read-only", "--cap-drop=all", "--security-opt=no-new-privileges", "--init")
READY_S: Final = 120.0
MANIFEST: Final = """
[trainers.default]
command = ["python", "train.py"]
directory = "."

[[jobs]]
name = "in-a-container"
model = "none"
"""
TRAIN: Final = """
import os, pathlib
print("trained as", os.getuid())
pathlib.Path(os.environ["STRATA_OUTPUT"], "model.txt").write_text("trained")
"""
_COMPILER: Final = re.compile(r"(.+-)?(gcc|g\+\+|cc1|cc1plus|clang|clang\+\+|tcc|nvcc)(-[\d.]+)?|cc|c\+\+|ld|as")
_CREDENTIALS: Final = re.compile(
    r"\.env|\.netrc|\.pypirc|\.git-credentials|pip\.conf|id_(rsa|dsa|ecdsa|ed25519)|auth\.json"
)
_PRIVATE_KEY: Final = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----\r?\n[A-Za-z0-9+/=\r\n]{64}")
_URL_WITH_PASSWORD: Final = re.compile(rb"https?://[\w.~%-]+:[\w.~%-]+@[\w.-]+")
_SETTING_OF_PIP: Final = re.compile(rb"\bPIP_\w+=")
_LARGEST_TEXT: Final = 1024**2
_PACKAGES: Final = "opt/strata/"
"""What comes from the index has examples of addresses in its texts, and of keys."""


def image_of(target: str) -> str:
    return f"localhost/strata-{target}"


def find_problems(layer: tarfile.TarFile, *, compiler: bool) -> Iterator[str]:
    """Yields what an image must not have: compilers, files of credentials, private keys, addresses with passwords."""
    for member in layer:
        name = Path(member.name).name
        program = "/bin/" in f"/{member.name}" or "/libexec/" in f"/{member.name}" or "/lib/gcc/" in f"/{member.name}"
        if not compiler and program and not member.isdir() and _COMPILER.fullmatch(name):
            yield f"a compiler: {member.name}"
        if not member.isfile() or not 0 < member.size <= _LARGEST_TEXT:
            continue
        if _CREDENTIALS.fullmatch(name):
            yield f"credentials: {member.name}"
        elif not member.name.removeprefix("./").startswith(_PACKAGES):
            content = layer.extractfile(member)
            assert content is not None
            text = content.read()
            if _PRIVATE_KEY.search(text) or _URL_WITH_PASSWORD.search(text):
                yield f"a private key or a password: {member.name}"


def find_in_metadata(metadata: bytes) -> Iterator[str]:
    """Yields what variables and commands of the build must not tell: an index of packages, or a password."""
    if _SETTING_OF_PIP.search(metadata) or _URL_WITH_PASSWORD.search(metadata):
        yield "a setting of pip or a password: the metadata"


def build(target: str, options: Sequence[str]) -> str:
    run("podman", "build", "--target", target, "--tag", image_of(target), *options, ".")
    return f"{int(_inspect(target, 'Size')) / 1e6:.0f} MB"


def scan(target: str) -> str:
    """Looks into the layers, not into the file system: what a later layer removes is still in the image."""
    if (user := _inspect(target, "Config.User")) != USER:
        raise ReleaseError(f"the user is {user or 'root'}, not {USER}")
    problems = list(find_in_metadata(run("podman", "image", "inspect", image_of(target)).encode()))
    files = 0
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "image.tar"
        run("podman", "save", "--quiet", "--format", "docker-archive", "--output", saved, image_of(target))
        with tarfile.open(saved) as archive:
            manifest = archive.extractfile("manifest.json")
            assert manifest is not None
            for name in json.load(manifest)[0]["Layers"]:
                with tarfile.open(fileobj=archive.extractfile(name)) as layer:
                    problems += find_problems(layer, compiler=target == "serve")
                    files += len(layer.getmembers())
    if problems:
        raise ReleaseError("\n".join(problems))
    run("podman", "run", "--rm", "--network=none", *CONFINED, image_of(target), "--version")
    return f"{files} files in the layers, no credentials" + ("" if target == "serve" else ", no compiler")


class Pod:
    """A hub and an agent that share one network, and nothing else of this machine."""

    NAME: Final = "strata-images"
    HUB: Final = f"{NAME}-hub"
    AGENT: Final = f"{NAME}-agent"

    def __enter__(self) -> Pod:
        run("podman", "pod", "create", "--name", self.NAME)
        return self

    def __exit__(self, *_: object) -> None:
        run("podman", "pod", "rm", "--force", "--time", "10", self.NAME)

    def start(self, name: str, target: str, *words: str) -> None:
        options = ("--detach", "--name", name, "--pod", self.NAME, *CONFINED, *words[:-1])
        run("podman", "run", *options, image_of(target), *words[-1].split())

    def execute(self, name: str, script: str, stdin: str = "") -> str:
        command = ("podman", "exec", "--interactive", name, "sh", "-c", script)
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ReleaseError(f"{script}: status {done.returncode}\n{done.stdout}{done.stderr}".rstrip())
        return done.stdout

    def wait(self, name: str, script: str) -> str:
        """What the command prints as soon as it succeeds."""
        for _ in range(int(READY_S)):
            with suppress(ReleaseError):
                return self.execute(name, script)
            time.sleep(1)
        raise ReleaseError(f"{script} never succeeded; {name} says:\n{run('podman', 'logs', name)}")


def run_job() -> str:
    """Runs a job by `strata apply` with a hub and an agent in containers; returns the level of its sandbox too."""
    began_s = time.monotonic()
    with Pod() as pod:
        pod.start(pod.HUB, "hub", "--env", "STRATA_HUB_TLS_NAMES=localhost", "hub")
        pod.wait(pod.HUB, "strata status")
        token = pod.execute(pod.HUB, "strata invite --name agent 2>/dev/null")
        pod.start(pod.AGENT, "agent", "--entrypoint", "sleep", "infinity")
        pod.execute(pod.AGENT, "strata join https://localhost:8443 --name agent", token)
        sandbox = re.search(r"sandbox: (\w+)", pod.execute(pod.AGENT, "strata agent check"))
        run("podman", "exec", "--detach", pod.AGENT, "strata", "agent")
        pod.execute(pod.HUB, "mkdir /tmp/job; cat > /tmp/job/manifest.toml", MANIFEST)
        pod.execute(pod.HUB, "cat > /tmp/job/train.py", TRAIN)
        pod.execute(pod.HUB, "strata apply /tmp/job/manifest.toml --wait")
        if "trained as 10001" not in pod.execute(pod.HUB, "strata logs in-a-container"):
            raise ReleaseError("the log of the job does not have what it printed")
    level = sandbox[1] if sandbox else "unknown"
    return f"a job completed {time.monotonic() - began_s:.0f} s after the start; sandbox of the agent: {level}"


def _inspect(target: str, field: str) -> str:
    return run("podman", "image", "inspect", "--format", f"{{{{.{field}}}}}", image_of(target)).strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=STEPS, default=STEPS, metavar="STEP", help=", ".join(STEPS))
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=TARGETS, metavar="TARGET")
    parser.add_argument("--base", help="the base image instead of that of the Containerfile")
    parser.add_argument("--build-option", action="append", default=[], metavar="OPTION")
    wanted = parser.parse_args()
    options = [*wanted.build_option, *([f"--build-arg=BASE={wanted.base}"] if wanted.base else [])]
    lines: dict[str, Callable[[], str]] = {}
    for target in wanted.targets:
        lines[f"build {target}"] = lambda target=target: build(target, options)  # type: ignore[misc]
        lines[f"scan {target}"] = lambda target=target: scan(target)  # type: ignore[misc]
    lines["run"] = run_job
    failed = 0
    for name, line in lines.items():
        if name.split()[0] not in wanted.only:
            continue
        began_s = time.monotonic()
        try:
            said = line()
        except (ReleaseError, subprocess.SubprocessError) as error:
            failed += 1
            said = f"FAILED: {error}"
        print(f"{name:<18} {time.monotonic() - began_s:6.1f} s  {said}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
