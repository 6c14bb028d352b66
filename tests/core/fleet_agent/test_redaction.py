"""What is left of a secret in a log: nothing, however the log was cut into pieces."""

from __future__ import annotations

import json
from collections.abc import Sequence
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


KEY = 'a"b/c<d\U0001f511\\e'


def spelled(text: str, spellings: Sequence[int]) -> str:
    """As a JSON library may write it: each character plain if it can be, or as one of its escapes."""
    units = [[f"\\u{unit:04x}" for unit in memoryview(each.encode("utf-16-le")).cast("H")] for each in text]
    written = []
    for each, unit, choice in zip(text, units, spellings, strict=True):
        escaped = "".join(unit)
        short = json.dumps(each, ensure_ascii=False)[1:-1]
        written.append([short, escaped, escaped.upper().replace("U", "u"), "\\/" if each == "/" else short][choice])
    return "".join(written)


PARTS = [
    *(spelled(KEY, [choice] * len(KEY)) for choice in range(4)),
    *("a", "\\", "\\\\", "\\u0061\\u0022b", "/c<d", "\\/c\\u003cd", "\\ud83d", "\\udd11", "\\\\e", '"}\n', KEY),
]


@settings(deadline=None, max_examples=30)
@given(parts=st.lists(st.sampled_from(PARTS), max_size=8), step=st.integers(1, 7))
def test_metrics_that_grow_in_pieces_are_redacted_as_if_they_were_whole(
    parts: list[str], step: int, tmp_path_factory: Any
) -> None:
    path: Path = tmp_path_factory.mktemp("log") / "metrics"
    hub, whole = Received(), "".join(parts).encode()
    uploader = StreamUploader(hub, lease(), "metrics", path, Redactor([KEY]))  # type: ignore[arg-type]
    for end in range(0, len(whole), step):
        path.write_bytes(whole[:end])
        uploader.upload_new()
    path.write_bytes(whole)
    uploader.upload_new(last=True)
    assert hub.content == Redactor([KEY]).redact(whole)
    assert len(hub.content) == len(whole)


# A value of digits that an escape ends with may begin within it: then more than the value is masked.
NO_DIGITS = st.characters(codec="utf-8", exclude_characters="0123456789abcdefABCDEF*")


@given(
    secret=st.text(NO_DIGITS, min_size=8, max_size=20),
    before=st.text(max_size=4),
    data=st.data(),
)
def test_a_value_is_masked_however_json_spells_it(secret: str, before: str, data: st.DataObject) -> None:
    name, value = [
        spelled(text, data.draw(st.lists(st.integers(0, 3), min_size=len(text), max_size=len(text))))
        for text in (secret, before + secret)
    ]
    line = f'{{"{name}":["{value}"]}}'
    masked = Redactor([secret]).redact(line.encode())
    assert len(masked) == len(line.encode())
    ((key, (note,)),) = json.loads(masked).items()
    assert set(key) == {"*"}
    assert secret not in note
    assert note.endswith("*" * len(secret))


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
