"""Fetches one commit of a git repository: allowed protocols (https, ssh, file), isolated configuration, and a timeout
of 600 s.

No hooks, no prompts, no submodules, and only the protocols that a list allows. The configuration of the user and of
the system applies where git fetches, because that is where credentials are; what git writes is the commit's content
alone, without filters and attributes from elsewhere. This runs in the process of the job's user (`privsep_worker`),
never in the agent.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from strata.base.errors import Code, StrataError

GIT_S: Final = 600.0
"""Time limit for all git commands of one checkout."""
REMOTE: Final = "https:ssh"
LOCAL: Final = "https:ssh:file"
_HTTPS: Final = re.compile(r"https://[^\x00-\x20\x7f]+")
_SSH: Final = re.compile(
    r"ssh://(?!-)[^\x00-\x20\x7f]+|(?:[A-Za-z0-9._-]+@)?[A-Za-z0-9][A-Za-z0-9.-]*:(?![:-])[^\x00-\x20\x7f]+"
)
_FILE: Final = re.compile(r"(?:file://)?/[^\x00-\x1f\x7f]*")
_ISOLATED: Final = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_NO_REPLACE_OBJECTS": "1",
}
"""No configuration but the repository's own."""


def check_url(url: str, protocols: str) -> str:
    """PRECONDITION unless the URL uses one of the protocols, in a form that git cannot take for an option."""
    forms = {"https": _HTTPS, "ssh": _SSH, "file": _FILE}
    if not any(forms[protocol].fullmatch(url) for protocol in protocols.split(":")):
        raise StrataError(
            Code.PRECONDITION,
            f"{url[:200]!r} is not an address of a git repository that this host fetches from",
            hint=f"allowed here: {', '.join(protocols.split(':'))}",
        )
    return url


def checkout(url: str, commit: str, scratch: Path, protocols: str, environ: Mapping[str, str]) -> Path:
    """The folder below `scratch` with the files of the commit."""
    check_url(url, protocols)
    git = _Git(scratch / "repository.git", protocols, environ)
    git.run("init", "--quiet", "--bare", "--template=", str(git.repository))
    # The one commit if the server allows that, else all branches and tags.
    if not git.succeeds("fetch", "--quiet", "--no-tags", "--depth=1", "--", url, commit):
        git.run("fetch", "--quiet", "--force", "--", url, "+refs/heads/*:refs/heads/*", "+refs/tags/*:refs/tags/*")
    if not git.succeeds("cat-file", "-e", f"{commit}^{{commit}}"):
        raise StrataError(Code.PRECONDITION, f"{url} has no commit {commit}")
    tree = scratch / "tree"
    tree.mkdir()
    git.run("read-tree", f"--index-output={scratch}/index", commit)
    git.run("checkout-index", "--all", "--force", index=f"{scratch}/index", tree=str(tree))
    return tree


class _Git:
    def __init__(self, repository: Path, protocols: str, environ: Mapping[str, str]) -> None:
        self.repository = repository
        self._deadline_s = time.monotonic() + GIT_S
        self._environ = dict(environ) | {
            "GIT_ALLOW_PROTOCOL": protocols,
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_ASKPASS": "",
            "SSH_ASKPASS": "",
            "GIT_SSH_COMMAND": "ssh -oBatchMode=yes -oConnectTimeout=30",
            "GIT_OPTIONAL_LOCKS": "0",
            "LC_ALL": "C",
        }

    def run(self, *args: str, index: str = "", tree: str = "") -> None:
        status, stderr = self._execute(args, index, tree)
        if status:
            raise StrataError(Code.PRECONDITION, f"git {args[0]} failed: {stderr or status}")

    def succeeds(self, *args: str) -> bool:
        return self._execute(args, "", "")[0] == 0

    def _execute(self, args: tuple[str, ...], index: str, tree: str) -> tuple[int, str]:
        location = [] if args[0] == "init" else [f"--git-dir={self.repository}"]
        location += [f"--work-tree={tree}"] if tree else []
        options = ["-c", f"core.hooksPath={os.devnull}", "-c", f"core.attributesFile={os.devnull}", "-c", "gc.auto=0"]
        # A server that sends nothing blocks a slot for a minute and not for ever.
        options += ["-c", "http.lowSpeedLimit=1", "-c", "http.lowSpeedTime=60"]
        environ = (
            self._environ | ({} if args[0] == "fetch" else _ISOLATED) | ({"GIT_INDEX_FILE": index} if index else {})
        )
        try:
            process = subprocess.Popen(
                ["git", *options, *location, *args],
                env=environ,
                cwd=self.repository.parent,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
        except FileNotFoundError:
            raise StrataError(Code.UNSUPPORTED, "git is not installed on this host") from None
        try:
            _, stderr = process.communicate(timeout=max(0.0, self._deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            # Its child processes may hold the pipe open; they end with this process.
            process.kill()
            raise StrataError(Code.PRECONDITION, f"git {args[0]} took more than {GIT_S:.0f} s") from None
        return process.returncode, stderr.decode(errors="replace").strip()[-2000:]
