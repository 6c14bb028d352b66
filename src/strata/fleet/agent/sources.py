"""Where the code of a job comes from: a folder of the host, a commit of a repository, an uploaded bundle.

Commits and bundles are kept, and each attempt gets a copy, so that two jobs never meet in one folder. Git is asked to
fetch and to write files and nothing else: no hooks, no prompts, no submodules.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from strata.base.digest import sha256_hex
from strata.base.errors import Code, StrataError
from strata.fleet.agent.unpack import unpack
from strata.fleet.core.jobspec import TrainerSpec

GIT_S: Final = 600.0
_COMMIT: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_BLOB: Final = re.compile(r"(?:sha256:)?([0-9a-f]{64})")

FetchArtifact = Callable[[str, Path], None]
"""Materialises an artifact in a folder that is not there yet."""
FetchBlob = Callable[[str], bytes]


def code_of(trainer: TrainerSpec) -> str:
    """What lineage records as the code: the commit or the bundle; a folder has no name of its own."""
    return trainer.commit or trainer.bundle


def provide(
    trainer: TrainerSpec,
    target: Path,
    cache: Path,
    *,
    environ: Mapping[str, str],
    fetch_artifact: FetchArtifact,
    fetch_blob: FetchBlob,
) -> Path:
    """The folder the job starts in: `target` with a copy of the source, or the host's own folder."""
    if trainer.directory:
        folder = Path(trainer.directory)
        if not folder.is_dir():
            raise StrataError(Code.PRECONDITION, f"the trainer's folder {folder} is not on this host")
        return folder
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    if trainer.git:
        kept = _checkout(trainer.git, trainer.commit, cache, environ)
    else:
        kept = _bundle(trainer.bundle, cache, fetch_artifact, fetch_blob)
    # When it was last used: what nobody uses is thrown away one day.
    os.utime(kept)
    shutil.copytree(kept, target, symlinks=True)
    return target


def _checkout(url: str, commit: str, cache: Path, environ: Mapping[str, str]) -> Path:
    if url.startswith("-") or not _COMMIT.fullmatch(commit):
        raise StrataError(Code.INVALID, f"{url!r} at {commit[:80]!r} is no commit of a repository")
    name = hashlib.sha256(url.encode()).hexdigest()[:16]
    kept = cache / f"{name}-{commit}"
    if kept.is_dir():
        return kept
    repository = cache / f"{name}.git"
    git = _Git(repository, environ)
    if not repository.is_dir():
        git.run("init", "--quiet", "--bare", "--template=", str(repository))
    if not git.has(commit):
        # One commit if the server lets us ask for it, all branches and tags if it does not.
        if not git.tries("fetch", "--quiet", "--no-tags", "--depth=1", "--", url, commit):
            git.run("fetch", "--quiet", "--force", "--", url, "+refs/heads/*:refs/heads/*", "+refs/tags/*:refs/tags/*")
        if not git.has(commit):
            raise StrataError(Code.PRECONDITION, f"{url} has no commit {commit}")
    partial = kept.with_name(f".{kept.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    git.run("read-tree", f"--index-output={partial}.index", commit)
    git.run("checkout-index", "--all", "--force", index=f"{partial}.index", tree=str(partial))
    Path(f"{partial}.index").unlink()
    partial.rename(kept)
    return kept


class _Git:
    def __init__(self, repository: Path, environ: Mapping[str, str]) -> None:
        self._repository = repository
        self._environ = dict(environ) | {
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_ASKPASS": "",
            "SSH_ASKPASS": "",
            "GIT_SSH_COMMAND": "ssh -oBatchMode=yes",
            "GIT_OPTIONAL_LOCKS": "0",
            "LC_ALL": "C",
        }

    def run(self, *args: str, index: str = "", tree: str = "") -> None:
        done = self._do(args, index, tree)
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip()[-2000:]
            raise StrataError(Code.PRECONDITION, f"git {args[0]} failed: {said or done.returncode}")

    def tries(self, *args: str) -> bool:
        return self._do(args, "", "").returncode == 0

    def has(self, commit: str) -> bool:
        return self.tries("cat-file", "-e", f"{commit}^{{commit}}")

    def _do(self, args: tuple[str, ...], index: str, tree: str) -> subprocess.CompletedProcess[bytes]:
        here = [] if args[0] == "init" else [f"--git-dir={self._repository}"]
        here += [f"--work-tree={tree}"] if tree else []
        safe = ["-c", f"core.hooksPath={os.devnull}", "-c", "protocol.ext.allow=never", "-c", "gc.auto=0"]
        environ = self._environ | ({"GIT_INDEX_FILE": index} if index else {})
        try:
            return subprocess.run(
                ["git", *safe, *here, *args],
                env=environ,
                cwd=self._repository.parent,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=GIT_S,
                check=False,
            )
        except FileNotFoundError:
            raise StrataError(Code.UNSUPPORTED, "git is not installed on this host") from None
        except subprocess.TimeoutExpired:
            raise StrataError(Code.DEADLINE, f"git {args[0]} took more than {GIT_S:.0f} s") from None


def _bundle(bundle: str, cache: Path, fetch_artifact: FetchArtifact, fetch_blob: FetchBlob) -> Path:
    blob = _BLOB.fullmatch(bundle)
    if blob is None and not bundle.startswith("artifact1_"):
        raise StrataError(Code.PRECONDITION, f"{bundle[:80]!r} is not an uploaded source")
    kept = cache / bundle.removeprefix("sha256:")
    if kept.is_dir():
        return kept
    if blob is None:
        fetch_artifact(bundle, kept)
        return kept
    archive = cache / f".{blob[1]}.tar"
    content = fetch_blob(blob[1])
    if sha256_hex(content) != blob[1]:
        raise StrataError(Code.CORRUPT, f"what was fetched as the source {blob[1]} is something else")
    archive.write_bytes(content)
    try:
        unpack(archive, kept)
    finally:
        archive.unlink()
    return kept
