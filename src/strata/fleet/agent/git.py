"""One commit of a repository: fetched and written as files by git, which is asked for nothing else.

No hooks, no prompts, no submodules, and of its protocols those that a list allows. The configuration of the user and of
the system counts where git fetches, for that is where credentials are; what it writes is the commit's content alone,
without filters and attributes from elsewhere. This runs in the process of the job's user (`job_input`), never in the
agent.
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
"""For all of it."""
REMOTE: Final = "https:ssh"
LOCAL: Final = "https:ssh:file"
_HTTPS: Final = re.compile(r"https://[^\x00-\x20\x7f]+")
_SSH: Final = re.compile(
    r"ssh://(?!-)[^\x00-\x20\x7f]+|(?:[A-Za-z0-9._-]+@)?[A-Za-z0-9][A-Za-z0-9.-]*:(?![:-])[^\x00-\x20\x7f]+"
)
_FILE: Final = re.compile(r"(?:file://)?/[^\x00-\x1f\x7f]*")
_ALONE: Final = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_NO_REPLACE_OBJECTS": "1",
}
"""Nothing but the repository decides what is written."""


def check_url(url: str, protocols: str) -> str:
    """PRECONDITION unless it is an address of one of the protocols, in a form that git takes for nothing else."""
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
    # One commit if the server lets us ask for it, all branches and tags if it does not.
    if not git.tries("fetch", "--quiet", "--no-tags", "--depth=1", "--", url, commit):
        git.run("fetch", "--quiet", "--force", "--", url, "+refs/heads/*:refs/heads/*", "+refs/tags/*:refs/tags/*")
    if not git.tries("cat-file", "-e", f"{commit}^{{commit}}"):
        raise StrataError(Code.PRECONDITION, f"{url} has no commit {commit}")
    tree = scratch / "tree"
    tree.mkdir()
    git.run("read-tree", f"--index-output={scratch}/index", commit)
    git.run("checkout-index", "--all", "--force", index=f"{scratch}/index", tree=str(tree))
    return tree


class _Git:
    def __init__(self, repository: Path, protocols: str, environ: Mapping[str, str]) -> None:
        self.repository = repository
        self._until_s = time.monotonic() + GIT_S
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
        status, said = self._do(args, index, tree)
        if status:
            raise StrataError(Code.PRECONDITION, f"git {args[0]} failed: {said or status}")

    def tries(self, *args: str) -> bool:
        return self._do(args, "", "")[0] == 0

    def _do(self, args: tuple[str, ...], index: str, tree: str) -> tuple[int, str]:
        here = [] if args[0] == "init" else [f"--git-dir={self.repository}"]
        here += [f"--work-tree={tree}"] if tree else []
        safe = ["-c", f"core.hooksPath={os.devnull}", "-c", f"core.attributesFile={os.devnull}", "-c", "gc.auto=0"]
        # A server that sends nothing holds a slot for a minute and not for ever.
        safe += ["-c", "http.lowSpeedLimit=1", "-c", "http.lowSpeedTime=60"]
        environ = self._environ | ({} if args[0] == "fetch" else _ALONE) | ({"GIT_INDEX_FILE": index} if index else {})
        try:
            process = subprocess.Popen(
                ["git", *safe, *here, *args],
                env=environ,
                cwd=self.repository.parent,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
        except FileNotFoundError:
            raise StrataError(Code.UNSUPPORTED, "git is not installed on this host") from None
        try:
            _, said = process.communicate(timeout=max(0.0, self._until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            # What it started may hold the pipe open, and is ended with this process.
            process.kill()
            raise StrataError(Code.PRECONDITION, f"git {args[0]} took more than {GIT_S:.0f} s") from None
        return process.returncode, said.decode(errors="replace").strip()[-2000:]
