"""What is left of a secret in a log: nothing, however the log was cut into pieces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from strata.fleet.agent.log_uploader import StreamUploader
from strata.fleet.agent.redaction import Redactor
from tests.core.fleet_agent.leases import lease

SECRET = "abababab-cab"


class Received:
    """The hub's side of a stream."""

    def __init__(self) -> None:
        self.content = b""

    def append(self, _lease: Any, _stream: str, offset: int, piece: bytes, *, last: bool = False) -> int:
        del last
        assert offset == len(self.content)
        self.content += piece
        return len(self.content)


@settings(deadline=None)
@given(parts=st.lists(st.sampled_from(["ab", "a", "b-", "cab", SECRET, "\n", "xabab", SECRET[:7]]), max_size=20))
def test_a_log_that_grows_in_pieces_is_redacted_as_if_it_were_whole(parts: list[str], tmp_path_factory: Any) -> None:
    path: Path = tmp_path_factory.mktemp("log") / "log"
    hub, whole = Received(), ""
    uploader = StreamUploader(hub, lease(), "log", path, Redactor([SECRET]))  # type: ignore[arg-type]
    for part in parts:
        whole += part
        path.write_text(whole)
        uploader.upload_new()
        assert SECRET.encode() not in hub.content
    uploader.upload_new(last=True)
    assert hub.content == Redactor([SECRET]).redact(whole.encode())
    assert len(hub.content) == len(whole)


def test_each_line_of_a_secret_is_removed_and_short_ones_stay() -> None:
    redactor = Redactor(["-----BEGIN KEY-----\nshort\nMIIEvQIBADANBgkq\n"])
    assert redactor.redact_text("a MIIEvQIBADANBgkq b short") == f"a {'*' * 16} b short"
    assert Redactor().redact_text("nothing to hide") == "nothing to hide"


def test_a_value_is_masked_as_json_spells_it_too() -> None:
    for secret in ('pass"word\\1', "two\nlines-of-a-key", "schlüssel-ü", "tab\tin-a-token"):
        redactor = Redactor([secret])
        for ascii_only in (True, False):
            line = json.dumps({"step": 1, f"m_{secret}": 0.5, "note": secret}, ensure_ascii=ascii_only)
            masked = redactor.redact(line.encode())
            assert len(masked) == len(line.encode())
            assert secret not in str(json.loads(masked))
            assert set(json.loads(masked)["note"]) == {"*"}
        assert secret not in redactor.redact_text(f"said {secret} aloud")
