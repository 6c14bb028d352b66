"""Settings files of earlier versions are read, and say what they said."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from strata.base.secret import Secret
from strata.base.settings import load
from tests.shell.golden.folder import contains
from tests.shell.golden.settings_files import SERVERS


def as_written(value: Any) -> Any:
    return value.reveal() if isinstance(value, Secret) else str(value)


@pytest.mark.parametrize("server", SERVERS)
def test_every_setting_has_the_value_of_the_file(part: Path, server: str) -> None:
    file = part / f"{server}.toml"
    written = tomllib.loads(file.read_text("utf-8"))
    assert written.keys() <= SERVERS[server].keys()
    for section, values in written.items():
        settings = load(SERVERS[server][section], section=section, file=file, environ={}, flags={})
        assert contains(msgspec.to_builtins(settings, enc_hook=as_written), values)
