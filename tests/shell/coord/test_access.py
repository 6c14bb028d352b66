"""Who is let in: tokens, TLS, mTLS, addresses. And what everybody may ask: health and reflection."""

from __future__ import annotations

import datetime
import ipaddress
import time
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from strata.base.errors import Code, StrataError
from strata.base.secret import Secret
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.server.process import SERVICE
from strata.coord.server.tokens import Claims, TokenRole, Tokens
from strata.coord.settings import CoordinatorSettings, ServerTls, check_exposure
from tests.shell.coord.running import health, in_process, refused

SECRET = Tokens(Secret("s" * 32))
LATER = round(time.time()) + 3_600
Status = grpc.StatusCode


def bearer(token: str, **more: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"), *((f"strata-{key}", value) for key, value in more.items()))


def token(job: str = "j", role: TokenRole = TokenRole.WORKER, expires_s: int = LATER, worker: str = "") -> str:
    return SECRET.issue(Claims(job, role, expires_s, worker))


async def test_a_token_names_the_job_and_the_worker() -> None:
    async with in_process(tokens=SECRET) as running:
        bound = bearer(token(worker="w"))
        config = await running.stub.RegisterWorker(pb.WorkerInfo(), metadata=bound)
        assert config.job_id == "j"
        await running.stub.Heartbeat(pb.HeartbeatRequest(), metadata=bound)
        anybody = bearer(token())
        await running.stub.RegisterWorker(pb.WorkerInfo(worker_id="x"), metadata=anybody)
        shown = (await running.stub.GetJob(pb.GetJobRequest(), metadata=anybody)).job
        assert {each.worker_id for each in shown.workers} == {"w", "x"}


@pytest.mark.parametrize(
    ("metadata", "request_", "status"),
    [
        ((), pb.WorkerInfo(worker_id="w"), Status.UNAUTHENTICATED),
        ((("authorization", "Basic abc"),), pb.WorkerInfo(worker_id="w"), Status.UNAUTHENTICATED),
        (bearer("nonsense"), pb.WorkerInfo(worker_id="w"), Status.UNAUTHENTICATED),
        (bearer(token()[:-2] + "AA"), pb.WorkerInfo(worker_id="w"), Status.UNAUTHENTICATED),
        (
            bearer(Tokens(Secret("t" * 32)).issue(Claims("j", TokenRole.WORKER, LATER))),
            pb.WorkerInfo(worker_id="w"),
            Status.UNAUTHENTICATED,
        ),
        (bearer(token(expires_s=1)), pb.WorkerInfo(worker_id="w"), Status.UNAUTHENTICATED),
        (bearer(token()), pb.WorkerInfo(worker_id="w", job_id="other"), Status.PERMISSION_DENIED),
        (bearer(token(), job="other"), pb.WorkerInfo(worker_id="w", job_id="j"), Status.PERMISSION_DENIED),
        (bearer(token(worker="w")), pb.WorkerInfo(worker_id="other"), Status.PERMISSION_DENIED),
        (bearer(token(worker="w"), worker="other"), pb.WorkerInfo(), Status.PERMISSION_DENIED),
        (bearer(token(role=TokenRole.OPERATOR)), pb.WorkerInfo(worker_id="w"), Status.PERMISSION_DENIED),
    ],
    ids=[
        "none", "not a bearer", "nonsense", "forged", "another secret", "expired", "another job",
        "metadata of another job", "another worker", "metadata of another worker", "role of an operator",
    ],
)  # fmt: skip
async def test_a_call_is_refused_with(
    metadata: tuple[tuple[str, str], ...], request_: pb.WorkerInfo, status: grpc.StatusCode
) -> None:
    async with in_process(tokens=SECRET) as running:
        assert (await refused(running.stub.RegisterWorker(request_, metadata=metadata))).code() is status
        assert not running.service.state.jobs


async def test_only_operators_give_commands_and_a_batch_is_checked_one_by_one() -> None:
    async with in_process(tokens=SECRET) as running:
        worker, operator = bearer(token()), bearer(token(role=TokenRole.OPERATOR))
        await running.stub.RegisterWorker(pb.WorkerInfo(worker_id="w"), metadata=worker)
        order = pb.IssueCommandRequest(kind=pb.COMMAND_KIND_DRAIN)
        assert (await refused(running.stub.IssueCommand(order, metadata=worker))).code() is Status.PERMISSION_DENIED
        assert list((await running.stub.IssueCommand(order, metadata=operator)).worker_ids) == ["w"]
        batch = pb.HeartbeatBatchRequest(
            heartbeats=[pb.HeartbeatRequest(worker_id="w"), pb.HeartbeatRequest(worker_id="w", job_id="other")]
        )
        found = await running.stub.HeartbeatBatch(batch, metadata=worker)
        assert [each.status_code for each in found.outcomes] == [0, 7]


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(StrataError, match="at least 32"):
        Tokens(Secret("short"))


class Certificate(NamedTuple):
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        return self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )


def certificate(name: str, issuer: Certificate | None = None, address: str = "127.0.0.1") -> Certificate:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.certificate.subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .sign(issuer.key if issuer else key, hashes.SHA256())
    )
    return Certificate(made, key)


def tls_files(folder: Path, server: Certificate, client_ca: Certificate | None = None) -> ServerTls:
    (folder / "server.pem").write_bytes(server.pem)
    (folder / "server.key").write_bytes(server.key_pem)
    if client_ca is not None:
        (folder / "clients.pem").write_bytes(client_ca.pem)
    return ServerTls(
        certificate=folder / "server.pem",
        key=folder / "server.key",
        client_ca=folder / "clients.pem" if client_ca else None,
    )


async def test_tls_serves_those_who_trust_it(tmp_path: Path) -> None:
    authority = certificate("authority")
    tls = tls_files(tmp_path, certificate("server", authority))
    credentials = grpc.ssl_channel_credentials(authority.pem)
    async with in_process(tls=tls, credentials=credentials) as running:
        assert (await running.stub.RegisterWorker(pb.WorkerInfo(worker_id="w"), timeout=10)).generation == 1
    stranger = grpc.ssl_channel_credentials(certificate("stranger").pem)
    async with in_process(tls=tls, credentials=stranger) as running:
        error = await refused(running.stub.RegisterWorker(pb.WorkerInfo(worker_id="w"), timeout=10))
        assert error.code() is Status.UNAVAILABLE
        assert not running.service.state.jobs


async def test_mtls_lets_in_only_clients_of_its_authority(tmp_path: Path) -> None:
    authority = certificate("authority")
    tls = tls_files(tmp_path, certificate("server", authority), client_ca=authority)
    known, stranger = certificate("worker", authority), certificate("stranger")
    with_certificate = grpc.ssl_channel_credentials(authority.pem, known.key_pem, known.pem)
    async with in_process(tls=tls, credentials=with_certificate) as running:
        assert (await running.stub.RegisterWorker(pb.WorkerInfo(worker_id="w"), timeout=10)).generation == 1
    for credentials in (
        grpc.ssl_channel_credentials(authority.pem),
        grpc.ssl_channel_credentials(authority.pem, stranger.key_pem, stranger.pem),
    ):
        async with in_process(tls=tls, credentials=credentials) as running:
            error = await refused(running.stub.RegisterWorker(pb.WorkerInfo(worker_id="w"), timeout=10))
            assert error.code() is Status.UNAVAILABLE
            assert not running.service.state.jobs


TLS = ServerTls(certificate=Path("c"), key=Path("k"))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (CoordinatorSettings(listen="0.0.0.0:7070"), "in the clear"),
        (CoordinatorSettings(listen="[::]:7070"), "in the clear"),
        (CoordinatorSettings(listen="example.org:7070"), "in the clear"),
        (CoordinatorSettings(listen="0.0.0.0:7070", token_secret=Secret("s" * 32)), "in the clear"),
        (CoordinatorSettings(listen="0.0.0.0:7070", tls=TLS), "operator of all jobs"),
        (
            CoordinatorSettings(
                listen="0.0.0.0:7070", tls=ServerTls(certificate=Path("c"), key=Path("k"), client_ca=Path("a"))
            ),
            "names no job and no role",
        ),
        (CoordinatorSettings(listen="7070"), "HOST:PORT"),
    ],
)
def test_an_address_that_others_reach_is_refused_unless_guarded(settings: CoordinatorSettings, problem: str) -> None:
    with pytest.raises(StrataError, match=problem) as caught:
        check_exposure(settings)
    assert caught.value.code is Code.INVALID


@pytest.mark.parametrize(
    "settings",
    [
        CoordinatorSettings(),
        CoordinatorSettings(listen="[::1]:7070"),
        CoordinatorSettings(listen="localhost:7070"),
        CoordinatorSettings(listen="0.0.0.0:7070", tls=TLS, token_secret=Secret("s" * 32)),
    ],
)
def test_a_guarded_address_is_fine(settings: CoordinatorSettings) -> None:
    check_exposure(settings)


async def test_health_says_whether_it_leads_and_reflection_shows_the_contract() -> None:
    async with in_process() as running:
        assert await health(running.channel, SERVICE) == health_pb2.HealthCheckResponse.SERVING
        ask = running.channel.stream_stream(
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        async for answer in ask(iter([reflection_pb2.ServerReflectionRequest(list_services="")])):
            names = {each.name for each in answer.list_services_response.service}
            assert names == {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    async with in_process(standby=True) as running:
        assert await health(running.channel, SERVICE) == health_pb2.HealthCheckResponse.NOT_SERVING
        # The process itself is well.
        assert await health(running.channel, "") == health_pb2.HealthCheckResponse.SERVING
