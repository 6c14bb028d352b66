"""The pictures of the documents are all there, are of real pages at their sizes, are small, and bring nothing along."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from tests.e2e.browser import SCHEMES, SIZES
from tests.e2e.screens import IMAGES, SCREENS, picture_name, read_screens

ROOT: Final = Path(__file__).parents[2]
MOST_BYTES: Final = 3 << 20
ONE_BYTES: Final = 400 << 10
MARKDOWN: Final = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")
HTML: Final = re.compile(r'(?:src|srcset)="([^"]+)"')
SVG: Final = "{http://www.w3.org/2000/svg}"
TAGS: Final = ("svg", "title", "desc", "style", "defs", "marker", "g", "path", "rect", "text")
"""No script, no image, no foreign object."""


def documents() -> list[Path]:
    return [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def named(page: Path) -> list[Path]:
    """The pictures that a page shows."""
    text = re.sub(r"(?ms)^\s*```.*?^\s*```|`[^`\n]*`", "", page.read_text(encoding="utf-8"))
    targets = [*(found[2] for found in MARKDOWN.finditer(text)), *HTML.findall(text)]
    return [(page.parent / target.partition("#")[0]).resolve() for target in targets]


def webp_size(content: bytes) -> tuple[int, int]:
    """Width and height by the head of an extended WebP (RFC 9649)."""
    assert (content[:4], content[8:16]) == (b"RIFF", b"WEBPVP8X")
    return int.from_bytes(content[24:27], "little") + 1, int.from_bytes(content[27:30], "little") + 1


def test_every_picture_that_a_document_names_exists_and_each_is_shown_somewhere() -> None:
    shown = {path for page in documents() for path in named(page)}
    assert [str(path) for path in shown if not path.is_file()] == []
    pictures = {path for path in IMAGES.iterdir() if path.suffix != ".json"}
    assert {path.name for path in pictures - shown} == set()


def test_every_picture_has_words_for_those_who_do_not_see_it() -> None:
    for page in documents():
        text = page.read_text(encoding="utf-8")
        assert all(found[1].strip() for found in MARKDOWN.finditer(text)), page
        assert all('alt="' in tag for tag in re.findall(r"<img [^>]*>", text)), page


def test_all_pictures_together_are_small() -> None:
    sizes = {path.name: path.stat().st_size for path in IMAGES.iterdir()}
    assert {name for name, size in sizes.items() if size > ONE_BYTES} == set()
    assert sum(sizes.values()) <= MOST_BYTES


def test_screenshots_are_of_the_recorded_pages_at_the_recorded_widths() -> None:
    record = read_screens()
    assert {name: screen.path for name, screen in record.items()} == SCREENS, "make pictures"
    expected = {picture_name(name, size, scheme) for name in record for size in SIZES for scheme in SCHEMES}
    assert {path.name for path in IMAGES.glob("*.webp")} == expected
    for name, screen in record.items():
        for size, (width, _) in screen.viewports.items():
            for scheme in SCHEMES:
                found = webp_size((IMAGES / picture_name(name, size, scheme)).read_bytes())
                assert found[0] % width == 0, (name, found)


def test_drawings_have_a_title_both_themes_and_nothing_from_elsewhere() -> None:
    drawings = sorted(IMAGES.glob("*.svg"))
    assert len(drawings) >= 4
    for path in drawings:
        text = path.read_text(encoding="utf-8")
        root = ElementTree.fromstring(text)
        assert root.get("viewBox")
        assert root.findtext(f"{SVG}title")
        assert "prefers-color-scheme: dark" in text, path.name
        assert {each.tag for each in root.iter()} <= {SVG + tag for tag in TAGS}, path.name
        assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\((?!#)|href", text) == [], path.name
