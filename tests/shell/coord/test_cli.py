"""`strata coordinator` as a command: settings from everywhere, tokens, and what it says when something is missing."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import grpc
import pytest

from strata.base.errors import StrataError
from strata.base.secret import Secret
from strata.cli.exit_codes import ExitCode
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.pb import coordinator_pb2_grpc as pb_grpc
from strata.coord.server.tokens import Claims, TokenRole, Tokens
from tests.shell.coord.running import STRATA

SECRET = "0123456789abcdef" * 4


def strata(*args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [STRATA, "coordinator", *args], capture_output=True, text=True, timeout=30, env=environ, check=False
    )


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text(f"{SECRET}\n")
    path.chmod(0o600)
    return path


def test_a_token_is_all_that_is_printed(secret_file: Path) -> None:
    args = ["token", "--job", "j", "--worker", "w", "--ttl", "30m", "--id", "t1", "--renew-for", "0s"]
    done = strata(*args, STRATA_COORDINATOR_TOKEN_SECRET_FILE=str(secret_file))
    assert (done.returncode, done.stderr) == (0, "")
    tokens = Tokens(Secret(SECRET))
    claims = tokens.read(done.stdout.strip(), time.time())
    assert claims == Claims("j", TokenRole.WORKER, claims.expires_s, "w", id="t1", issued_s=claims.issued_s)
    assert abs(claims.expires_s - time.time() - 1_800) < 60
    with pytest.raises(StrataError, match="expired"):
        tokens.read(done.stdout.strip(), time.time() + 1_900)


def test_a_token_is_renewed_for_a_month_and_says_what_it_is_revoked_by(tmp_path: Path, secret_file: Path) -> None:
    environment = {"STRATA_COORDINATOR_TOKEN_SECRET_FILE": str(secret_file)}
    done = strata("token", "--job", "j", **environment)
    claims = Tokens(Secret(SECRET)).read(done.stdout.strip(), time.time())
    assert claims.renew_until_s - claims.issued_s == 30 * 86_400
    assert f"revoke {claims.id}" in done.stderr
    refused = strata("revoke", claims.id, **environment)
    assert (refused.returncode, "revoked_tokens" in refused.stderr) == (ExitCode.USAGE, True)
    file = tmp_path / "revoked"
    for token_id in (claims.id, "another"):
        done = strata("revoke", token_id, STRATA_COORDINATOR_REVOKED_TOKENS=str(file), **environment)
        assert done.returncode == 0
    assert file.read_text(encoding="utf-8").split() == [claims.id, "another"]


def test_the_secret_may_stand_in_the_settings_file(tmp_path: Path, secret_file: Path) -> None:
    config = tmp_path / "strata.toml"
    config.write_text(f'[coordinator]\ntoken_secret = {{ file = "{secret_file}" }}\n')
    done = strata("token", "--config", str(config), "--job", "j", "--role", "operator")
    assert Tokens(Secret(SECRET)).read(done.stdout.strip(), 0).role is TokenRole.OPERATOR


def test_a_settings_file_before_a_subcommand_counts_for_it(tmp_path: Path, secret_file: Path) -> None:
    config, other, revoked = tmp_path / "config.toml", tmp_path / "other.toml", tmp_path / "revoked"
    config.write_text(f'[coordinator]\ntoken_secret = {{ file = "{secret_file}" }}\nrevoked_tokens = "{revoked}"\n')
    other.write_text("[coordinator]\n")
    done = strata("--config", str(config), "token", "--job", "j")
    assert Tokens(Secret(SECRET)).read(done.stdout.strip(), time.time()).job == "j"
    assert strata("--config", str(config), "revoke", "t1").returncode == 0
    assert revoked.read_text() == "t1\n"
    nearer = strata("--config", str(config), "token", "--config", str(other), "--job", "j")
    assert (nearer.returncode, "there is no secret" in nearer.stderr) == (ExitCode.USAGE, True)


def test_the_dashboard_takes_the_settings_file_before_its_name(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text("[coordinator]\nlisten_to = 1\n")
    refused = strata("--config", str(config), "dashboard")
    assert (refused.returncode, "listen_to" in refused.stderr) == (ExitCode.USAGE, True)


@pytest.mark.parametrize(
    ("option", "subcommand"),
    [("--listen", ["dashboard"]), ("--database", ["token", "--job", "j"]), ("--tls-client-ca", ["revoke", "t1"])],
)
def test_an_option_of_a_coordinator_before_a_subcommand_is_refused(option: str, subcommand: list[str]) -> None:
    refused = strata(option, "somewhere", *subcommand)
    assert refused.returncode == ExitCode.USAGE
    assert refused.stderr.startswith(f"strata: {option} before '{subcommand[0]}' does not count for it")
    assert refused.stderr.endswith("hint: strata coordinator --help\n")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["token", "--job", "j"], "there is no secret"),
        (["token", "--job", "j", "--ttl", "soon"], "'soon' is not a time"),
        (["--listen", "0.0.0.0:0"], "in the clear"),
        (["--listen", "nowhere"], "not HOST:PORT"),
        (["--database", "mysql://x"], "not a database"),
        (["--tls-key", "k"], "coordinator.tls.certificate: required"),
    ],
)
def test_what_cannot_work_is_said_at_once(args: list[str], said: str) -> None:
    done = strata(*args)
    assert done.returncode == ExitCode.USAGE
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_secret_that_others_can_read_is_refused(secret_file: Path) -> None:
    secret_file.chmod(0o644)
    done = strata("token", "--job", "j", STRATA_COORDINATOR_TOKEN_SECRET_FILE=str(secret_file))
    assert done.returncode == ExitCode.USAGE
    assert "chmod 600" in done.stderr
    assert SECRET not in done.stderr


@pytest.mark.parametrize("module", ["grpc", "uvloop"])
def test_a_missing_extra_is_exactly_one_line(module: str) -> None:
    code = """
        import sys
        class Absent:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] == sys.argv[1]:
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        sys.meta_path.insert(0, Absent())
        from strata.cli.main import run
        sys.exit(run(["coordinator"]))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), module], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == ExitCode.USAGE
    assert len(done.stderr.splitlines()) == 1
    assert "pip install 'strata-train[" in done.stderr


def test_the_whole_process_serves_with_tokens_and_ends_on_sigterm(tmp_path: Path, secret_file: Path) -> None:
    config = tmp_path / "strata.toml"
    config.write_text(
        textwrap.dedent(f"""
            [coordinator]
            listen = "127.0.0.1:0"
            database = "sqlite:{tmp_path}/coord.db"
            token_secret = {{ file = "{secret_file}" }}
            [coordinator.job]
            settle_s = 0.01
            heartbeat_interval_s = 3.0
            parameters = {{ lr = "0.1" }}
        """)
    )
    process = subprocess.Popen([STRATA, "coordinator", "--config", str(config)], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        first = process.stderr.readline()
        found = re.fullmatch(
            r"strata coordinator: listening on (127\.0\.0\.1:\d+), no TLS, tokens required, .*\n", first
        )
        assert found, first
        assert "leadership_acquired" in process.stderr.readline()
        made = strata("token", "--config", str(config), "--job", "j").stdout.strip()
        with grpc.insecure_channel(found[1]) as channel:
            stub = pb_grpc.CoordinatorStub(channel)
            request = pb.WorkerInfo(worker_id="w")
            with pytest.raises(grpc.RpcError):
                stub.RegisterWorker(request, timeout=10)
            config_ = stub.RegisterWorker(request, metadata=(("authorization", f"Bearer {made}"),), timeout=10)
        assert (config_.heartbeat_interval_ms, dict(config_.training_parameters)) == (3_000, {"lr": "0.1"})
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
