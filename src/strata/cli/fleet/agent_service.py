"""The systemd unit of the agent (`strata join --service`): its text, installation and removal."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from strata.base.errors import Code, StrataError

UNIT: Final = "strata-agent.service"
_TEXT: Final = """\
[Unit]
Description=Strata agent
After=network-online.target

[Service]
ExecStart={program} agent --state {state} --log-format json
ExecReload=/bin/kill -USR1 $MAINPID
Restart=always
RestartSec=2
# The agent ends its jobs itself when it is stopped; when it crashes or is reloaded they run on, for the next agent.
KillMode=process
OOMPolicy=continue
TimeoutStopSec=90
NoNewPrivileges=yes

[Install]
WantedBy=default.target
"""


def unit_path() -> Path:
    from strata.sdk.fleet import client_settings

    return client_settings().config_home.expanduser() / "systemd" / "user" / UNIT


def unit_text(state: Path) -> str:
    program = Path(sys.argv[0]).resolve() if Path(sys.argv[0]).name == "strata" else Path("strata")
    return _TEXT.format(program=_quoted(program), state=_quoted(state))


def install(state: Path) -> str:
    if shutil.which("systemctl") is None:
        raise StrataError(Code.UNSUPPORTED, "there is no systemd here", hint="start 'strata agent' yourself")
    path = unit_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(unit_text(state), encoding="utf-8")
    _systemctl("daemon-reload")
    _systemctl("enable", "--now", UNIT)
    return UNIT


def remove() -> bool:
    """Says whether there was one."""
    path = unit_path()
    if not path.exists():
        return False
    if shutil.which("systemctl") is not None:
        _systemctl("disable", "--now", UNIT)
    path.unlink()
    return True


def _systemctl(*words: str) -> None:
    done = subprocess.run(
        ["systemctl", "--user", *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        message = (done.stderr or done.stdout).strip()[-500:]
        raise StrataError(Code.PRECONDITION, f"systemctl {words[0]} failed: {message}")


def _quoted(path: Path) -> str:
    """Quotes a path as systemd reads it: in quotes, with its specifiers doubled."""
    text = str(path).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{text}"'
