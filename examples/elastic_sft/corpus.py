"""Prompts and completions from the reference that every Python carries for `help()`: real text, nothing to download."""

from __future__ import annotations

import json
from pathlib import Path
from pydoc_data.topics import topics
from typing import Final

COMPLETION: Final = 100
"""Characters of a completion."""


def write_corpus(path: Path, samples: int) -> None:
    """JSONL, one sample a line: its id, what is asked, and what is to be learnt as the answer."""
    with path.open("w", encoding="utf-8") as out:
        for number, (topic, text) in zip(range(samples), _pieces(), strict=False):
            sample = {"id": number, "prompt": f"{topic}: ", "completion": text}
            out.write(json.dumps(sample) + "\n")


def _pieces() -> list[tuple[str, str]]:
    return [
        (topic, text[start : start + COMPLETION])
        for topic, text in sorted(topics.items())
        for start in range(0, len(text), COMPLETION)
    ]
