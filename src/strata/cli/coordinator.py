"""`strata coordinator`: run the coordinator or its dashboard, issue or revoke tokens of workers, and get a certificate
from the hub.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import click

from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.cli.fleet.client import hub_client, hub_option
from strata.cli.options import config_option, configure_log, log_format_option, read_duration
from strata.cli.output import print_error, redact, write

OWN_COMMAND: Final = (sys.executable, "-c", "from strata.cli.main import main; main()", "coordinator")
"""The command line by which other commands start a coordinator for themselves."""


def _or_before(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """The file named here, or before the subcommand, as in `strata coordinator --config FILE token`."""
    if value is None and ctx.parent is not None:
        return ctx.parent.params.get(param.name or "")
    return value


_config: Final = config_option("coordinator", callback=_or_before)


@click.group(invoke_without_command=True)
@_config
@click.option("--listen", metavar="HOST:PORT", help="Listen here for workers (default 127.0.0.1:7070).")
@click.option("--metrics-listen", metavar="HOST:PORT", help="Serve metrics for Prometheus here (default: nowhere).")
@click.option("--database", metavar="URL", help="sqlite:PATH, or postgresql://…, which several coordinators can share.")
@click.option(
    "--partitions",
    metavar="N",
    help="Divide the jobs into N parts, shared out among all coordinators on this PostgreSQL (default 1).",
)
@click.option(
    "--tls-certificate", metavar="FILE", help="Server certificate, PEM; required unless it listens on loopback."
)
@click.option("--tls-key", metavar="FILE", help="Private key of the certificate, PEM.")
@click.option("--tls-client-ca", metavar="FILE", help="Accept only clients with a certificate of this authority, PEM.")
@log_format_option
@click.pass_context
def coordinator(ctx: click.Context, /, config: Path | None, **flags: str | None) -> None:
    """Run the coordinator that keeps the workers of a job together.

    Every option can also be set in FILE or in the environment (STRATA_COORDINATOR_LISTEN, …). Of several coordinators
    on one PostgreSQL database one leads and the others stand by; with --partitions each leads its share of the
    jobs, and workers may call any of them. SIGTERM drains it.
    """
    if ctx.invoked_subcommand is None:
        _run(config, flags)
        return
    given = next((name for name, value in flags.items() if value is not None), None)
    if given is not None:
        option = f"--{given.replace('_', '-')}"
        raise click.UsageError(
            f"{option} before '{ctx.invoked_subcommand}' does not count for it, only --config does: write options of"
            f" '{ctx.invoked_subcommand}' after its name",
            ctx,
        )


def _run(config: Path | None, flags: dict[str, str | None]) -> None:
    from strata.base.settings import load
    from strata.cli.extras import require

    require("grpc", extra="coordinator")
    require("uvloop", extra="coordinator")
    from strata.coord.server.process import run
    from strata.coord.settings import SECTION, CoordinatorSettings

    dotted = {name.replace("tls_", "tls."): value for name, value in flags.items()}
    settings = load(CoordinatorSettings, section=SECTION, file=config, flags=dotted)
    configure_log(settings.log_format, settings.log_level)
    database = redact(settings.database)
    run(settings, lambda line: print_error(f"strata coordinator: {line}, journal {database}"))


@coordinator.command()
@_config
@click.option(
    "--job", required=True, metavar="JOB", help="The job that the token is for; * with --role operator: all jobs."
)
@click.option(
    "--worker",
    default="",
    metavar="ID",
    help="The only worker that may use the token (default: any worker of the job).",
)
@click.option(
    "--role",
    type=click.Choice(["worker", "operator"]),
    default="worker",
    show_default=True,
    help="What the token may do.",
)
@click.option(
    "--ttl",
    type=read_duration,
    default="24h",
    show_default=True,
    metavar="TIME",
    help="Time until the token expires: 90s, 30m, 24h, 7d.",
)
@click.option(
    "--renew-for",
    type=read_duration,
    default="30d",
    show_default=True,
    metavar="TIME",
    help="How long heartbeats renew a worker's token; 0s: never.",
)
@click.option(
    "--id", "revoke_id", metavar="NAME", help="Id to revoke the token by (default: a new one, printed to stderr)."
)
def token(config: Path | None, revoke_id: str | None, ttl: float, renew_for: float, **wanted: str) -> None:
    """Print a token for workers or operators of a job.

    A running worker gets a new token before its own expires, for the time given by --renew-for.

    The secret is read from FILE (token_secret = { file = "…" }) or from the file named by
    STRATA_COORDINATOR_TOKEN_SECRET_FILE, never from the command line.
    """
    from strata.base.clock import SystemClock
    from strata.base.ids import Ids
    from strata.base.settings import load
    from strata.coord.server.tokens import Claims, TokenRole, Tokens
    from strata.coord.settings import SECTION, CoordinatorSettings

    if ttl <= 0:
        raise click.BadParameter("a token is valid for some time", param_hint="--ttl")
    ttl_s, renew_s = round(ttl), round(renew_for)
    secret = load(CoordinatorSettings, section=SECTION, file=config, flags={}).token_secret
    if secret is None:
        raise StrataError(
            Code.INVALID,
            "there is no secret to sign tokens with",
            hint="set STRATA_COORDINATOR_TOKEN_SECRET_FILE, or token_secret in the file given by --config",
        )
    clock = SystemClock()
    now_s, role = round(clock.wall_s()), TokenRole(wanted["role"])
    claims = Claims(
        job=wanted["job"],
        role=role,
        expires_s=now_s + ttl_s,
        worker=wanted["worker"],
        id=revoke_id or Ids(clock).new("token"),
        issued_s=now_s,
        renew_until_s=now_s + max(ttl_s, renew_s) if renew_s and role is TokenRole.WORKER else 0,
    )
    made = Tokens(secret).issue(claims)
    if revoke_id is None:
        print_error(f"strata coordinator: token {claims.id}; 'strata coordinator revoke {claims.id}' revokes it")
    write(made)


@coordinator.command()
@_config
@click.argument("revoke_id", metavar="ID")
def revoke(config: Path | None, revoke_id: str) -> None:
    """Revoke a token and all its renewals.

    Adds its id to the file that the setting revoked_tokens names. Every coordinator that reads the file rejects the
    token within a second, and ends the streams that it opened.
    """
    from strata.base.settings import load
    from strata.coord.settings import SECTION, CoordinatorSettings

    file = load(CoordinatorSettings, section=SECTION, file=config, flags={}).revoked_tokens
    if file is None:
        raise StrataError(
            Code.INVALID,
            "there is no file of revoked tokens",
            hint="set revoked_tokens in the settings of the coordinator, and restart it once",
        )
    if not revoke_id or revoke_id.split() != [revoke_id]:
        raise StrataError(Code.INVALID, f"{revoke_id!r} is not the id of a token")
    with file.open("a", encoding="utf-8") as lines:
        lines.write(f"{revoke_id}\n")


@coordinator.command()
@click.option(
    "--name",
    "names",
    multiple=True,
    required=True,
    metavar="NAME",
    help="DNS name or address at which workers reach the coordinator; repeatable.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    metavar="FOLDER",
    help="Write cert.pem, key.pem and ca.pem here.",
)
@hub_option
def certificate(*, names: tuple[str, ...], out: Path, context: str | None) -> None:
    """Get a certificate for a coordinator from the hub's authority.

    Needs the role operator. The private key is created here and never sent. Run it again to renew the certificate, with
    a new key, and restart the coordinator: it reads its files at its start only.
    """
    import datetime

    from strata.base.atomic import temporary_path, write_file
    from strata.cli.extras import require

    require("cryptography", extra="agent")
    from strata.fleet.wire.identities import CoordinatorCertificateReply, CoordinatorCertificateRequest
    from strata.identity.ca import new_signing_request

    # The authority first: what a crash leaves is of this hub, and the command can run again.
    files = {name: out / name for name in ("ca.pem", "key.pem", "cert.pem")}
    key, request = new_signing_request()
    body = CoordinatorCertificateRequest(names=names, request_pem=request.decode())
    with hub_client(context) as client:
        reply = client.call("POST", "/v1/certificate/coordinator", CoordinatorCertificateReply, body=body)
    _check_folder(files, reply.ca_pem)
    out.mkdir(parents=True, exist_ok=True)
    contents = {"ca.pem": reply.ca_pem.encode(), "key.pem": key, "cert.pem": reply.certificate_pem.encode()}
    new = {name: temporary_path(path) for name, path in files.items()}
    # All are written before one is replaced: key and certificate belong together.
    for name, content in contents.items():
        write_file(new[name], content, mode=0o600 if name == "key.pem" else 0o644)
        _keep_owner(files[name], new[name])
    for name, path in files.items():
        failpoint("cli.coordinator.before_certificate_file")
        new[name].replace(path)
    # Whoever replaces last sees a mixture, if there is one. A lock would not do: homes on NFS refuse it.
    if any(path.read_bytes() != contents[name] for name, path in files.items()):
        raise StrataError(
            Code.CONFLICT, f"another renewal wrote into {out} at the same time", hint="run the command again"
        )
    until = datetime.datetime.fromtimestamp(reply.expires_at_s, datetime.UTC).date().isoformat()
    print_error(f"strata coordinator: certificate for {', '.join(reply.names)}, valid until {until}")
    print_error(
        f"  strata coordinator --tls-certificate {files['cert.pem']} --tls-key {files['key.pem']}\n"
        f"  STRATA_WORKER_TLS_CA={files['ca.pem']} for workers, --tls-ca for 'strata gang'"
    )


def _keep_owner(old: Path, new: Path) -> None:
    """A renewal by root leaves the key readable for the user of the coordinator."""
    if old.exists() and os.geteuid() == 0:
        stat = old.stat()
        os.chown(new, stat.st_uid, stat.st_gid, follow_symlinks=False)


def _check_folder(files: Mapping[str, Path], ca_pem: str) -> None:
    """Raise CONFLICT unless the files are missing or of the same authority: a key that is replaced is gone."""
    authority, there = files["ca.pem"], [each for each in files.values() if each.exists()]
    if there and not (authority in there and authority.read_bytes() == ca_pem.encode()):
        raise StrataError(
            Code.CONFLICT, f"{there[0]} is not of this hub's authority", hint="choose another folder with --out"
        )


@coordinator.command()
@_config
@click.option(
    "--listen",
    default="127.0.0.1:7071",
    show_default=True,
    metavar="HOST:PORT",
    help="Listen here for browsers; loopback only.",
)
@click.option("--address", metavar="HOST:PORT", help="Address of the coordinator (default: where FILE has it listen).")
@click.option("--tls-ca", metavar="FILE", help="Certificate authority of the coordinator, PEM.")
def dashboard(config: Path | None, listen: str, address: str | None, tls_ca: str | None) -> None:
    """Show the gangs of a coordinator in a browser, without a hub.

    A process of its own, so that looking costs the coordinator little. Where the coordinator needs tokens, log in with
    one of 'strata coordinator token --role operator --job "*"'. A hub shows the same pages (setting hub.coordinator).
    """
    from strata.base.settings import load
    from strata.cli.extras import require

    require("grpc", extra="worker")
    require("psutil", extra="worker")
    require("jinja2", extra="hub")
    require("uvicorn", extra="hub")
    from strata.coord.settings import SECTION, CoordinatorSettings
    from strata.coord.worker.settings import Tls
    from strata.hub.lone_coordinator import run

    settings = load(CoordinatorSettings, section=SECTION, file=config, flags={})
    tls = None if tls_ca is None else Tls(ca=Path(tls_ca))
    run(settings, listen, address or settings.listen, tls, lambda line: print_error(f"strata coordinator: {line}"))
