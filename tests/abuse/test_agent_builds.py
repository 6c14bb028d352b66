"""What a package may try while a host builds it from source for an environment: its code runs before the job does."""

from __future__ import annotations

import base64
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from strata.base.errors import Code, StrataError
from strata.base.private import private_folder
from strata.fleet.agent.environment_cache import EnvironmentCache, provide_environment
from strata.fleet.agent.host_cache import HostCache
from strata.fleet.agent.path_names import PathName
from strata.fleet.agent.prepare import create_work_folder
from strata.fleet.agent.sandbox import detect_sandbox
from strata.fleet.agent.settings import AgentSettings, SandboxSettings
from strata.fleet.agent.uv import EnvironmentPlan, UvProgram, build_environment, build_variables, read_source_files
from strata.fleet.core.jobspec import EnvironmentSpec
from tests.support.wheels import make_sdist

AREA = "agent: builds"
NEEDS = ("root", "bwrap", "ip", "nft")
KEY = "-----BEGIN PRIVATE KEY----- of the host"


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="strata-builds-"))
    made.chmod(0o711)
    yield made
    shutil.rmtree(made, ignore_errors=True)


def processes_with(word: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except OSError:
            continue
        if word.encode() in words:
            found.append(path.parent.name)
    return found


def a_cache(settings: AgentSettings, folder: Path, packages: Path) -> EnvironmentCache:
    """With one attempt, `a`."""
    sandbox = detect_sandbox(settings, {"HOME": str(folder / "home")}, 8 << 30)
    attempts = settings.work_folder / "attempts"
    (attempts / "a").mkdir()
    return EnvironmentCache(
        HostCache(settings.work_folder / "environments", attempts, 1 << 30),
        str(Path(sys.executable).with_name("uv")),
        "/usr/bin/python3",
        {"UV_OFFLINE": "1", "UV_FIND_LINKS": str(packages), "PATH": "/usr/bin:/bin"},
        sandbox.job_user,
        sandbox,
    )


@pytest.mark.attack(
    AREA, "read keys and processes of the host from a build, write to it, and stay when the build is over"
)
def test_the_build_of_a_package_is_confined_as_a_job_is(folder: Path, tries: Callable[[int], None]) -> None:
    packages, source, shared = folder / "packages", folder / "source", folder / "shared"
    for each, mode in ((packages, 0o755), (source, 0o755), (shared, 0o777)):
        each.mkdir()
        each.chmod(mode)
    wanted = SandboxSettings(mode="required", readable=(str(packages),))
    settings = AgentSettings(state=folder / "state", work=folder / "work", sandbox=wanted)
    create_work_folder(settings)
    key = private_folder(settings.state_folder) / "host.key"
    key.write_text(KEY)
    # As in the home of an agent that is not root: only the namespaces keep the build from it.
    settings.state_folder.chmod(0o755)
    key.chmod(0o644)
    word = f"stays-{secrets.token_hex(8)}"
    secret = secrets.token_hex(8)
    code = f"""
import glob, os, subprocess
TEXT = f"uid {{os.getuid()}};"
for path in [{str(key)!r}, *glob.glob("/proc/[0-9]*/environ")]:
    try:
        TEXT += f"{{path}} {{open(path).read()}};"
    except OSError as error:
        TEXT += f"no {{path}};"
for path in [{str(shared)!r}, {str(settings.work_folder)!r}, "/var/lib", "/"]:
    try:
        open(path + "/planted", "w").close()
        os.stat(path + "/planted")
    except OSError as error:
        TEXT += f"no {{path}};"
subprocess.Popen(
    ["sh", "-c", "sleep 300; echo {word}"], start_new_session=True, stdin=-3, stdout=-3, stderr=-3
)
"""
    make_sdist(packages, "evil", "1.0", code)
    (packages / "evil-1.0.tar.gz").chmod(0o644)
    (source / "requirements.txt").write_text("evil\n")
    cache = a_cache(settings, folder, packages)
    spying = subprocess.Popen(["sleep", "300"], env={"PRIVATE": secret}, user="nobody")
    try:
        built = provide_environment(cache, EnvironmentSpec(file="requirements.txt"), source, PathName("a"))
    finally:
        spying.kill()
        spying.wait()
    assert processes_with(word) == [], "a process of the build outlived it"
    python = Path(built.path) / "bin" / "python"
    program = "import evil; print(evil.TEXT)"
    text = subprocess.run([python, "-I", "-c", program], capture_output=True, text=True, check=True).stdout
    assert "uid 65534" in text
    assert f"no {key}" in text
    assert KEY not in text
    assert secret not in text
    assert not (shared / "planted").exists()
    assert not (settings.work_folder / "planted").exists()
    assert "no /var/lib" in text
    tries(text.count(";"))


ALLOCATES = "TEXT = str(len(b'x' * (1 << 30)))"
FORKS = """
import os, signal, time
made = []
try:
    while True:
        made.append(os.fork())
        if not made[-1]:
            time.sleep(300)
            os._exit(0)
except OSError as error:
    TEXT = f"made {len(made)}"
# They hold the output of the build open, for whose end uv waits.
for pid in made:
    os.kill(pid, signal.SIGKILL)
"""


@pytest.mark.attack(AREA, "take the memory or all processes of the host from a build")
@pytest.mark.parametrize("code", [ALLOCATES, FORKS], ids=["memory", "processes"])
def test_the_build_of_a_package_has_the_limits_of_a_job(folder: Path, code: str) -> None:
    packages, source = folder / "packages", folder / "source"
    for each in (packages, source):
        each.mkdir()
        each.chmod(0o755)
    wanted = SandboxSettings(mode="required", readable=(str(packages),), memory_gib=0.5, processes=100)
    settings = AgentSettings(state=folder / "state", work=folder / "work", sandbox=wanted)
    create_work_folder(settings)
    make_sdist(packages, "greedy", "1.0", code)
    (packages / "greedy-1.0.tar.gz").chmod(0o644)
    (source / "requirements.txt").write_text("greedy\n")
    cache = a_cache(settings, folder, packages)
    spec = EnvironmentSpec(file="requirements.txt")
    if code == ALLOCATES:
        with pytest.raises(StrataError, match=r"more memory than this host gives to a job \(0.5 GiB\)") as raised:
            provide_environment(cache, spec, source, PathName("a"))
        assert raised.value.code is Code.PRECONDITION
    else:
        python = Path(provide_environment(cache, spec, source, PathName("a")).path) / "bin" / "python"
        program = "import greedy; print(greedy.TEXT)"
        text = subprocess.run([python, "-I", "-c", program], capture_output=True, text=True, check=True).stdout
        assert 10 < int(text.split()[1]) <= 100
    parents = [Path(group).parent for group in cache.sandbox.limits_of(settings.work_folder).groups]
    assert parents
    name = cache.sandbox.limits_of(Path("x")).groups[0].rpartition("/")[2].removesuffix("x")
    assert [each for parent in parents for each in parent.glob(f"{name}*")] == [], "a control group is left"


class Index:
    """A package index on loopback that has nothing, and keeps who asked: `user:password`, or nothing."""

    def __init__(self) -> None:
        self.callers: list[str] = []
        callers = self.callers

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                sent = self.headers.get("Authorization", "")
                callers.append(base64.b64decode(sent.removeprefix("Basic ")).decode())
                self.send_response(404 if sent else 401)
                self.send_header("WWW-Authenticate", "Basic")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/simple"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def indexes() -> Iterator[tuple[Index, Index]]:
    """That of the host's owner, and one whose address a job's project file chose."""
    both = (Index(), Index())
    yield both
    for index in both:
        index.close()


PROJECT = """
[project]
name = "mine"
version = "0"
requires-python = ">=3.11"
dependencies = ["six"]
[[tool.uv.index]]
name = "corp"
url = "{url}"
"""
LOCK = """
version = 1
revision = 3
requires-python = ">=3.11"
[[package]]
name = "mine"
version = "0"
source = {{ virtual = "." }}
dependencies = [{{ name = "six" }}]
[[package]]
name = "six"
version = "1.17.0"
source = {{ registry = "{url}" }}
wheels = [{{ url = "{url}/six-1.17.0-py3-none-any.whl", hash = "sha256:{digest}", size = 5 }}]
"""


@pytest.mark.attack(AREA, "name an index of one's own as the host's index is named, and get its password")
@pytest.mark.parametrize("file", ["pyproject.toml", "uv.lock", "requirements.txt"])
def test_the_credentials_of_an_index_go_to_its_own_address_only(
    tmp_path: Path, indexes: tuple[Index, Index], file: str, tries: Callable[[int], None]
) -> None:
    own, foreign = indexes
    credentials = {"UV_INDEX_CORP_USERNAME": "ci", "UV_INDEX_CORP_PASSWORD": "p@ss/word"}
    for number, (named, url) in enumerate(
        [("UV_INDEX", own.url), ("UV_INDEX", foreign.url), ("UV_DEFAULT_INDEX", foreign.url)]
    ):
        environ = {named: f"corp={own.url}", "UV_HTTP_RETRIES": "0", "UV_PUBLISH_TOKEN": "t"} | credentials
        source = tmp_path / str(number)
        source.mkdir()
        (source / "pyproject.toml").write_text(PROJECT.format(url=url))
        (source / "uv.lock").write_text(LOCK.format(url=url, digest="0" * 64))
        (source / "requirements.txt").write_text(f"--index-url {url}\nsix\n")
        cache = unsandboxed_cache(tmp_path, environ)
        with pytest.raises(StrataError, match="the environment cannot be built"):
            provide_environment(cache, EnvironmentSpec(file=file), source, PathName("a"))
        if url == own.url:
            # Otherwise the host's own index would be of no use, and the rest would prove nothing.
            assert "ci:p@ss/word" in own.callers
    assert set(foreign.callers) <= {""}
    tries(len(own.callers) + len(foreign.callers))


def unsandboxed_cache(folder: Path, environ: Mapping[str, str]) -> EnvironmentCache:
    """Of an agent with these variables, which builds as its own user."""
    return EnvironmentCache(
        HostCache(folder / "environments", folder / "attempts", 1 << 30),
        str(Path(sys.executable).with_name("uv")),
        "/usr/bin/python3",
        build_variables(environ),
        None,
    )


NETWORK = {
    "http-proxy": '"{proxy}"',
    "https-proxy": '"{proxy}"',
    "no-proxy": "[]",
    "allow-insecure-host": '["127.0.0.1"]',
    "keyring-provider": '"subprocess"',
    "native-tls": "true",
    "system-certs": "true",
    "cache-dir": '"/tmp/shared"',
    "python-downloads": '"automatic"',
    "python-install-mirror": '"{proxy}"',
    "pypy-install-mirror": '"{proxy}"',
    "python-downloads-json-url": '"{proxy}"',
    "pip.keyring-provider": '"subprocess"',
    "pip.target": '"/tmp/shared"',
    "a-setting-of-tomorrow": "1",
}
"""What a project file may set of uv, and a job may not: how it reaches its indexes, with whose name, and where it
keeps things."""


@pytest.mark.attack(AREA, "E: a proxy in a project file, which gets the credentials of the host's own index")
@pytest.mark.parametrize("file", ["pyproject.toml", "uv.lock"])
@pytest.mark.parametrize("setting", NETWORK)
def test_a_project_file_does_not_choose_how_uv_reaches_the_index_of_the_host(
    tmp_path: Path, indexes: tuple[Index, Index], setting: str, file: str, tries: Callable[[int], None]
) -> None:
    own, proxy = indexes
    credentials = {"UV_INDEX_CORP_USERNAME": "ci", "UV_INDEX_CORP_PASSWORD": "password"}
    environ = {"UV_INDEX": f"corp={own.url}", "UV_HTTP_RETRIES": "0"} | credentials
    source = tmp_path / "source"
    source.mkdir()
    value = NETWORK[setting].format(proxy=proxy.url.removesuffix("/simple"))
    project = PROJECT.format(url=own.url)
    (source / "pyproject.toml").write_text(f"{project}[tool.uv]\n{setting} = {value}\n")
    (source / "uv.lock").write_text(LOCK.format(url=own.url, digest="0" * 64))
    cache = unsandboxed_cache(tmp_path, environ)
    tries(1)
    with pytest.raises(StrataError) as refused:
        provide_environment(cache, EnvironmentSpec(file=file), source, PathName("a"))
    assert proxy.callers == []
    assert (refused.value.code, own.callers) == (Code.INVALID, [])
    assert f"tool.uv.{setting}" in refused.value.message


@pytest.mark.attack(AREA, "E: uv's own settings, as the file of an environment")
@pytest.mark.parametrize("file", ["uv.toml", "UV.toml", "below/uv.toml"])
def test_the_file_of_an_environment_is_never_one_of_uvs_settings(tmp_path: Path, file: str) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / file).write_text('http-proxy = "http://127.0.0.1:1"\n')
    with pytest.raises(StrataError, match="the settings of uv") as refused:
        read_source_files(tmp_path, file)
    assert refused.value.code is Code.INVALID


@pytest.mark.attack(AREA, "E: a project file that the check of its settings does not understand")
@pytest.mark.parametrize(
    "text", ["[tool.uv\n", "a = " + "[" * 100_000, "\ufeff[tool.uv]\n", '[tool]\nuv = "x"\n', "[[tool.uv]]\n"]
)
def test_a_project_file_that_cannot_be_checked_is_refused(tmp_path: Path, text: str) -> None:
    run = UvProgram("/bin/false", tmp_path, {}, tmp_path / "target")
    plan = EnvironmentPlan(file="pyproject.toml", files={"pyproject.toml": text}, python="3", library="")
    with pytest.raises(StrataError, match=r"pyproject.toml(: tool.uv is no table| is no TOML)") as refused:
        build_environment(run, plan, wheels_only=True)
    assert refused.value.code is Code.INVALID
    assert list(tmp_path.iterdir()) == []


@pytest.mark.attack(AREA, "name an index as the credentials of the host, which say of no index that it is theirs")
def test_credentials_without_an_index_are_refused_and_never_passed(tries: Callable[[int], None]) -> None:
    for name in ("UV_INDEX_CORP_PASSWORD", "UV_INDEX_CORP_USERNAME"):
        for index in ({}, {"UV_INDEX": "other=https://a.test/simple https://b.test/simple"}):
            with pytest.raises(StrataError, match=f"{name} belongs to no index of the agent.s UV_INDEX") as refused:
                build_variables({name: "secret", **index})
            assert refused.value.code is Code.INVALID
            assert "secret" not in str(refused.value)
            tries(1)
    passed = build_variables({"UV_PUBLISH_TOKEN": "t", "UV_PUBLISH_PASSWORD": "p", "UV_GITHUB_TOKEN": "g"})
    assert passed == {}
    assert build_variables({"UV_API_KEY": "k", "UV_PYX_API_KEY": "k"}) == {}


# In the place of uv: it says what it reaches.
REACHES = """#!/usr/bin/python3
import socket, sys
for address in ("169.254.169.254", "127.0.0.2"):
    try:
        socket.create_connection((address, 7), 3).close()
        print(address, "reached", file=sys.stderr)
    except OSError:
        print(address, "refused", file=sys.stderr)
sys.exit(1)
"""
# Runs a build in the network namespace it is started in, whose loopback has the address of metadata services.
INSIDE = """
import socket, subprocess, sys
from dataclasses import replace
from pathlib import Path
from strata.base.errors import StrataError
from tests.abuse.test_agent_builds import *
folder = Path(sys.argv[1])
for words in ("link set lo up", "address add 169.254.169.254/32 dev lo"):
    subprocess.run(["ip", *words.split()], check=True)
with socket.create_server(("0.0.0.0", 7)):
    wanted = SandboxSettings(mode="required", network=sys.argv[2])
    settings = AgentSettings(state=folder / "state", work=folder / "work", sandbox=wanted)
    create_work_folder(settings)
    cache = replace(a_cache(settings, folder, folder), program=str(folder / "bin" / "uv"))
    try:
        provide_environment(cache, EnvironmentSpec(file="requirements.txt"), folder / "source", PathName("a"))
    except StrataError as error:
        print(error.message)
subprocess.run(["nft", "list", "tables"], check=True)
"""


@pytest.mark.attack(AREA, "reach the metadata of a cloud from a build")
@pytest.mark.parametrize("network", ["host", "allow"])
def test_a_build_has_the_network_of_the_host_without_metadata(folder: Path, network: str) -> None:
    (folder / "bin").mkdir()
    (folder / "bin" / "uv").write_text(REACHES)
    (folder / "source").mkdir()
    (folder / "source" / "requirements.txt").touch()
    for path in (folder / "bin", folder / "bin" / "uv", folder / "source"):
        path.chmod(0o755)
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", INSIDE, folder, network],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "169.254.169.254 refused\n127.0.0.2 reached" in done.stdout
    # No rule of a build is left behind.
    assert "strata" not in done.stdout.rpartition("cannot be built")[2]
