"""Detects what this host can confine jobs with (user, namespaces, control groups, network rules), and turns
`[agent.sandbox]` into limits, mounts and network rules of each job.

`detect_sandbox` finds out once, by trying it, what the host can do, and `HostSandbox.confine` turns the plain spec of
a job into a confined one. A container runtime would be a second such function: from here on a supervisor runs a spec
and does not know what confines it.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from strata.base.errors import Code, StrataError
from strata.fleet import seccomp
from strata.fleet.agent import cgroup, job_limits
from strata.fleet.agent.attempt_folder import AttemptPaths, JobUser, find_job_user, make_passable
from strata.fleet.agent.settings import AgentSettings, SandboxSettings
from strata.fleet.agent.supervised import LimitsSpec, SupervisorSpec
from strata.fleet.bubblewrap import PROGRAMS, MountView, link_chain, load_filter, namespace_options
from strata.fleet.core.requirement import LimitsLevel, SandboxLevel
from strata.fleet.wire.leases import LeaseGiven

GIB: Final = 1024**3
TRY_S: Final = 30.0
_MEMORY_SHARE: Final = 0.9
_HOMES: Final = Path("/home")
_FIRST_PERSON: Final = 1000
"""Users below are those of the system."""
_SYSTEM: Final = (Path("/usr"), Path("/etc"), Path("/dev"), Path("/proc"), Path("/sys"), Path("/var/lib"))
"""Never hidden, whosever home they are."""
METADATA: Final = (
    "169.254.169.254", "fd00:ec2::254", "fd20:ce::254", "fd00:c1::a9fe:a9fe", "fe80::a9fe:a9fe",
    "169.254.170.2", "169.254.170.23", "fd00:ec2::23",
    "168.63.129.16", "100.100.100.200", "169.254.0.23", "169.254.42.42", "fd00:42::42",
)  # fmt: skip
"""Where clouds give the credentials of a machine to whoever asks from it: by most of them, to containers on AWS, on
Azure, Alibaba Cloud, Tencent Cloud and Scaleway."""


LIMITED: Final = ("memory", "processes", "cpu")


class DeclaredAmounts(NamedTuple):
    """What a job declared of its host and got; 0: it declared nothing of it, and the default of the host counts."""

    cores: int = 0
    ram_gib: float = 0.0
    cpu_weight: int = 0
    """The cores that the hub counts for it, declared or not."""


NOTHING_DECLARED: Final = DeclaredAmounts()


def declared_amounts(lease: LeaseGiven) -> DeclaredAmounts:
    taken = lease.taken
    if taken.whole:
        return NOTHING_DECLARED
    return DeclaredAmounts(taken.cores if lease.spec.needs.min_cores else 0, taken.ram_gib, taken.cores)


@dataclass(frozen=True, slots=True)
class HostSandbox:
    """How jobs are confined on this host. Without arguments: not at all."""

    level: SandboxLevel = "none"
    missing: tuple[str, ...] = ()
    """What the host cannot do, and why."""
    settings: SandboxSettings = field(default_factory=SandboxSettings)
    job_user: JobUser | None = None
    bwrap: str = ""
    """Empty: no namespaces."""
    as_root: bool = False
    """Bubblewrap starts as root, without a user namespace; otherwise as the job's user, in one."""
    parents: cgroup.JobParents = field(default_factory=cgroup.JobParents)
    memory_bytes: int = 0
    view: MountView = field(default_factory=MountView)
    filter: bytes = b""
    """The filter of system calls of jobs in namespaces (`seccomp`). Empty: there is none."""
    blocks_metadata: bool = False
    """Jobs with the host's network do not reach the addresses in METADATA."""

    def describe(self) -> str:
        """Describes it for people, in one line."""
        words = {
            "none": "none: jobs run as the agent's user and can read its credentials",
            "user": "user: jobs run as a user of their own and see the host's files and processes",
            "namespaces": "namespaces: jobs see their own files and processes only",
        }
        limits = [f"{name} by {self._limited_by(name)}" for name in LIMITED if self.limits != "none"]
        limits += ["disk by a watcher"] if self.settings.disk_gib else []
        network = f"network {self.settings.network}"
        network += " without the metadata addresses of clouds" if self.blocks_metadata else ""
        return "; ".join((words[self.level], *limits, network, *self.missing))

    @property
    def limits(self) -> LimitsLevel:
        """Returns how jobs are kept to the amounts that they declared."""
        if self.settings.mode == "off" or sys.platform != "linux":
            return "none"
        return "enforced" if self.parents.limits.issuperset(LIMITED) else "watched"

    @property
    def lacks(self) -> tuple[str, ...]:
        """Returns what the host cannot do, in words, also of what a weaker means does instead."""
        if self.limits == "none":
            return self.missing
        weaker = [
            f"no control group limits {name}: {self._limited_by(name)} does"
            for name in LIMITED
            if name not in self.parents.limits
        ]
        return (*self.missing, *weaker)

    def confine(
        self,
        spec: SupervisorSpec,
        paths: AttemptPaths,
        *,
        readable: Sequence[Path] = (),
        writable: Sequence[Path] = (),
        gpus: bool = False,
        declared: DeclaredAmounts = NOTHING_DECLARED,
    ) -> SupervisorSpec:
        """The spec with all that confines it. `readable` are caches of the agent that this job may see, `writable`
        folders that it may change beside that of its attempt."""
        limits = self.limits_of(paths.folder, writable, declared)
        if not self.bwrap:
            return msgspec.structs.replace(spec, limits=limits)
        for needed in filter(os.path.isabs, (spec.cwd, spec.command[0])):
            self.view.check_visible(Path(needed), (paths.folder, *readable))
        return msgspec.structs.replace(
            spec,
            env={**spec.env, "HOME": str(paths.home)},
            wrapper=self.wrapper(paths, readable=readable, writable=writable, gpus=gpus),
            filter=self.filter,
            switch_inside=self.as_root,
            limits=limits,
        )

    def limit_disk(
        self,
        spec: SupervisorSpec,
        paths: AttemptPaths,
        writable: Sequence[Path] = (),
        declared: DeclaredAmounts = NOTHING_DECLARED,
    ) -> SupervisorSpec:
        """Limits the disk of a job that something else confines; the rest of its limits are noted for messages."""
        known = self.limits_of(paths.folder, writable, declared)
        limits = LimitsSpec(
            memory_bytes=known.memory_bytes,
            memory_set_by=known.memory_set_by,
            processes=known.processes,
            cores=known.cores,
            disk_bytes=known.disk_bytes,
            disk_folders=known.disk_folders,
        )
        return msgspec.structs.replace(spec, limits=limits)

    def memory_limit(self, ram_gib: float) -> tuple[int, str]:
        """Returns the limit in bytes of a job that declared so much, and which setting of whom it is."""
        own = int(self.settings.memory_gib * GIB)
        if ram_gib and not 0 < own < int(ram_gib * GIB):
            return int(ram_gib * GIB), "min_ram_gib of the job"
        return self.memory_bytes, "sandbox.memory_gib of the host" if own else "nine tenths of the host's memory"

    def wrapper(
        self,
        paths: AttemptPaths,
        *,
        readable: Sequence[Path] = (),
        writable: Sequence[Path] = (),
        gpus: bool = False,
    ) -> tuple[str, ...]:
        return (
            self.bwrap,
            *namespace_options(as_root=self.as_root, network=self.settings.network != "none"),
            *self.view.mount_options(paths.folder, tmp=paths.tmp, readable=readable, writable=writable, gpus=gpus),
        )

    def build_wrapper(self, scratch: Path, target: Path, readable: Sequence[Path]) -> tuple[str, ...]:
        """Wraps the build of an environment: these two folders are writable, and the network is the host's."""
        hidden = [folder for folder in readable if self.view.hides(folder)]
        return (
            self.bwrap,
            *namespace_options(as_root=self.as_root, network=True),
            *self.view.mount_options(scratch, tmp=scratch, readable=hidden, writable=[target]),
        )

    def limits_of(
        self,
        folder: Path,
        writable: Sequence[Path] = (),
        declared: DeclaredAmounts = NOTHING_DECLARED,
        *,
        host_network: bool = False,
    ) -> LimitsSpec:
        """The limits of what works in this folder: an attempt, or the build of an environment (`host_network`)."""
        if self.settings.mode == "off" or sys.platform != "linux":
            return LimitsSpec()
        # Two agents of one machine must not share a group.
        name = f"strata-{hashlib.sha256(bytes(self.view.state)).hexdigest()[:8]}-{folder.name}"
        groups = tuple(str(parent / name) for parent in self.parents.groups)
        table = f"strata_{hashlib.sha256(name.encode()).hexdigest()[:16]}"
        only_allowed = self.settings.network == "allow" and not host_network
        rules = ""
        if only_allowed or self.blocks_metadata:
            rules = network_rules(table, Path(groups[-1]), self.settings.allow, only_allowed=only_allowed)
        memory_bytes, memory_set_by = self.memory_limit(declared.ram_gib)
        return LimitsSpec(
            memory_bytes=memory_bytes,
            memory_set_by=memory_set_by,
            processes=self.settings.processes,
            cores=declared.cores,
            cpu_weight=declared.cpu_weight,
            disk_bytes=int(self.settings.disk_gib * GIB),
            disk_folders=_texts([folder, *writable]) if self.settings.disk_gib else (),
            groups=groups,
            watch_memory="memory" not in self.parents.limits,
            watch_processes="processes" not in self.parents.limits,
            watch_cpu="cpu" not in self.parents.limits,
            # Of the agent's own user it would count what has nothing to do with the job.
            limit_user="processes" not in self.parents.limits and self.job_user is not None,
            network_rules=rules,
            network_table=table if rules else "",
        )

    def _limited_by(self, name: str) -> str:
        return "control group" if name in self.parents.limits else "a watcher"


UNCONFINED: Final = HostSandbox()


def job_user_of(settings: AgentSettings) -> JobUser | None:
    """The user whom jobs run as. An agent of root runs none as root, unless its owner has turned the sandbox off."""
    if settings.run_as or settings.sandbox.mode == "off" or not is_root():
        return find_job_user(settings.run_as)
    import pwd

    for name in ("strata-job", "nobody"):
        try:
            pwd.getpwnam(name)
        except KeyError:
            continue
        return find_job_user(name)
    raise StrataError(Code.PRECONDITION, "the agent is root, and there is no user for its jobs", hint="set run_as")


def detect_sandbox(settings: AgentSettings, environ: Mapping[str, str], ram_bytes: int) -> HostSandbox:
    """Try what the settings ask for. PRECONDITION if the host cannot do what they require."""
    wanted = settings.sandbox
    networks(wanted.allow)
    job_user = job_user_of(settings)
    homes = _people_homes(environ, job_user)
    plain = HostSandbox(
        level="none" if job_user is None else "user",
        settings=wanted,
        job_user=job_user,
        view=MountView(
            state=settings.state_folder,
            work=settings.work_folder,
            homes=_outermost(homes),
            programs=_program_paths(settings.interpreter, homes),
            readable=_folders("readable", wanted.readable),
            writable=_folders("writable", wanted.writable),
            hidden=tuple(Path(text).expanduser().absolute() for text in wanted.hidden),
        ),
        memory_bytes=int(wanted.memory_gib * GIB) or int(_MEMORY_SHARE * ram_bytes),
    )
    if wanted.mode == "off" or sys.platform != "linux":
        missing = ("it is turned off",) if wanted.mode == "off" else ("this system has no namespaces",)
        found = replace(plain, missing=missing)
    else:
        found = _with_namespaces(replace(plain, parents=cgroup.job_parents()))
    _require(found)
    return found if wanted.mode == "off" or wanted.network == "none" else _with_network_rules(found)


def networks(texts: Sequence[str]) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    try:
        return [ipaddress.ip_network(text) for text in texts]
    except ValueError as error:
        raise StrataError(Code.INVALID, f"agent.sandbox.allow: {error}", hint='as in ["10.1.0.0/16"]') from None


def network_rules(table: str, group: Path, allow: Sequence[str], *, only_allowed: bool) -> str:
    """Rules for nft: sockets of this control group reach no metadata of a cloud, and with `only_allowed` nothing but
    these networks and, on this machine, each other.

    A metadata address that `allow` names is reached, and DNS at all of them: on some clouds it is the resolver.
    What a job sends to this machine itself is marked, and accepted only by a socket of the same job. Of TCP only the
    first packet is checked: for the third one the kernel has no socket yet whose group could be compared.
    """
    root = cgroup.ROOT
    mount = root if (root / "cgroup.controllers").exists() else root / "unified"
    level = len(group.relative_to(mount).parts)
    of_job = f'socket cgroupv2 level {level} "{group.relative_to(root)}"'
    mark = int(hashlib.sha256(table.encode()).hexdigest()[:8], 16) or 1
    allowed, metadata = networks(allow), networks(METADATA)
    named = [network for network in allowed if network in metadata]
    others = f"""
{_for_each(allowed, "accept")}
    oifname "lo" meta mark set {mark} accept
    reject"""
    return f"""
table inet {table}
delete table inet {table}
table inet {table} {{
  chain metadata {{
    meta l4proto {{ tcp, udp }} th dport 53 return
    reject
  }}
  chain job {{
{_for_each(named, "accept")}
{_for_each(metadata, "jump metadata")}
{others if only_allowed else ""}
  }}
  chain output {{
    type filter hook output priority filter; policy accept;
    {of_job} jump job
  }}
  chain input {{
    type filter hook input priority filter; policy accept;
    meta mark {mark} tcp flags & (syn | ack) != syn accept
    meta mark {mark} {of_job} accept
    meta mark {mark} reject
  }}
}}
"""


def _for_each(addresses: Sequence[ipaddress.IPv4Network | ipaddress.IPv6Network], verdict: str) -> str:
    return "\n".join(f"    {'ip' if each.version == 4 else 'ip6'} daddr {each} {verdict}" for each in addresses)


def _with_namespaces(plain: HostSandbox) -> HostSandbox:
    bwrap = shutil.which("bwrap", path=PROGRAMS)
    if bwrap is None:
        return replace(plain, missing=("no namespaces: bubblewrap is not installed",))
    reasons = []
    has_filter = seccomp.is_supported()
    lack = () if has_filter else ("no filter of system calls: this kernel or processor has none",)
    plain = replace(plain, filter=seccomp.build_filter() if has_filter else b"", missing=(*plain.missing, *lack))
    for as_root in (True, False) if plain.job_user is not None else (False,):
        tried = replace(plain, level="namespaces", bwrap=bwrap, as_root=as_root)
        reason = _try(tried)
        if not reason:
            return tried
        reasons.append(reason)
    return replace(plain, filter=b"", missing=(f"no namespaces: {reasons[0]}",))


def _try(sandbox: HostSandbox) -> str:
    """Run a program in the sandbox, as a job would be; why it fails, or empty."""
    job_user = sandbox.job_user
    # None: subprocess keeps what this process has.
    user = None if job_user is None or sandbox.as_root else job_user
    with tempfile.TemporaryDirectory(prefix=".sandbox-", dir=sandbox.view.work) as name:
        paths = AttemptPaths(Path(name))
        paths.tmp.mkdir()
        for folder in (paths.tmp, paths.folder):
            make_passable(folder)
        if job_user is not None:
            os.lchown(paths.tmp, job_user.uid, job_user.gid)
        try:
            with load_filter(sandbox.filter) as (options, passed):
                done = subprocess.run(
                    [*sandbox.wrapper(paths), *options, "--", sys.executable, "-I", "-S", "-c", "pass"],
                    env={},
                    cwd="/",
                    pass_fds=passed,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    timeout=TRY_S,
                    check=False,
                    user=None if user is None else user.uid,
                    group=None if user is None else user.gid,
                    extra_groups=None if user is None else user.groups,
                )
        except (OSError, subprocess.SubprocessError) as error:
            return str(error)
    return done.stderr.decode(errors="replace").strip()[-300:] if done.returncode else ""


def _require(found: HostSandbox) -> None:
    wanted = found.settings
    if wanted.mode == "required" and found.level != "namespaces":
        reason = "; ".join(found.missing)
        raise StrataError(Code.PRECONDITION, f"agent.sandbox.mode is required, and this host has {reason}")
    if wanted.network == "none" and found.level != "namespaces":
        reason = "; ".join(found.missing)
        raise StrataError(Code.PRECONDITION, f'agent.sandbox.network = "none" needs namespaces: {reason}')
    if wanted.network == "allow" and wanted.mode == "off":
        raise StrataError(Code.PRECONDITION, 'agent.sandbox.network = "allow" needs a sandbox: it is turned off')


def _with_network_rules(found: HostSandbox) -> HostSandbox:
    reason = _try_network_rules(found)
    if reason and found.settings.network == "allow":
        raise StrataError(Code.PRECONDITION, f'agent.sandbox.network = "allow" is not possible here: {reason}')
    lack = (f"jobs reach the metadata addresses of clouds ({METADATA[0]}): {reason}",) if reason else ()
    return replace(found, blocks_metadata=not reason, missing=(*found.missing, *lack))


def _try_network_rules(found: HostSandbox) -> str:
    """Says whether rules hold: a process in a group without allowed networks must not reach this one. Empty: they
    do."""
    if not is_root() or shutil.which("nft", path=PROGRAMS) is None or not found.parents.groups:
        return "it needs an agent of root, nftables and control groups of version 2"
    group = found.parents.groups[-1] / f"strata-try-{os.getpid()}"
    table = f"strata_try_{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as server:
        join = f"open({str(group / 'cgroup.procs')!r}, 'w').write('0')"
        connect = f"socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 5)"
        try:
            group.mkdir()
            job_limits.run_nft(network_rules(table, group, (), only_allowed=True))
            done = subprocess.run(
                [sys.executable, "-I", "-S", "-c", f"import socket; {join}; {connect}"],
                capture_output=True,
                timeout=TRY_S,
                check=False,
            )
        except (OSError, subprocess.SubprocessError) as error:
            return str(error)
        finally:
            with suppress(OSError):
                job_limits.run_nft(f"delete table inet {table}")
            cgroup.remove_groups([group])
    return "" if b"ConnectionRefused" in done.stderr else "the kernel does not match the sockets of a control group"


def _texts(folders: Sequence[Path]) -> tuple[str, ...]:
    return tuple(map(str, folders))


def _folders(setting: str, texts: Sequence[str]) -> tuple[Path, ...]:
    """INVALID if one is not there: without it no sandbox can be made, and a slip of the pen must not turn it off."""
    folders = tuple(Path(text).expanduser().absolute() for text in texts)
    for folder in folders:
        if not folder.exists():
            raise StrataError(Code.INVALID, f"agent.sandbox.{setting}: there is no {folder}")
    return folders


def _people_homes(environ: Mapping[str, str], job_user: JobUser | None) -> set[Path]:
    """The homes of all people of this host: /home, that of root, and those that its users have elsewhere."""
    texts = {environ.get("HOME", ""), "" if job_user is None else job_user.home, str(_HOMES)}
    if sys.platform != "win32":
        import pwd

        for uid in (0, os.geteuid()):
            with suppress(KeyError):
                texts.add(pwd.getpwuid(uid).pw_dir)
        # The home of a service can be a folder that jobs need, and nobody logs in there.
        texts |= {
            user.pw_dir
            for user in pwd.getpwall()
            if user.pw_uid >= _FIRST_PERSON and not user.pw_shell.endswith(("/nologin", "/false"))
        }
    homes = {Path(text).resolve() for text in texts if text}
    # Not `Path.is_dir`, which raises for a home that an agent without root cannot look at, and its jobs cannot either.
    homes = {home for home in homes if os.path.isdir(home)}  # noqa: PTH112
    return {home for home in homes if not any(each.is_relative_to(home) for each in _SYSTEM)}


def _outermost(homes: AbstractSet[Path]) -> tuple[Path, ...]:
    return tuple(sorted(home for home in homes if homes.isdisjoint(home.parents)))


def _program_paths(interpreter: str, homes: AbstractSet[Path]) -> tuple[Path, ...]:
    """The folders of the interpreters. A folder that holds other things of a person is not among them, but the link or
    the program in it."""
    paths = {folder for folder in (Path(sys.prefix), Path(sys.base_prefix)) if not _is_personal(folder, homes)}
    for program in filter(None, (sys.executable, interpreter)):
        for path in link_chain(Path(program)):
            if len(path.parents) > 2:
                folder = path.parents[1]
                paths.add(path if _is_personal(folder, homes) else folder)
    return tuple(sorted(path for path in paths if path.exists()))


def _is_personal(folder: Path, homes: AbstractSet[Path]) -> bool:
    """Says whether a folder is a home, holds one, or is the `.local` of one, where programs and secrets lie
    together."""
    home = folder.parent if folder.name == ".local" else folder
    return home.parent == _HOMES or any(each.is_relative_to(home) for each in homes)


def is_root() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0
