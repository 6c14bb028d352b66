"""A hook of mkdocs (`hooks` in mkdocs.yml): writes llms.txt, a line for each page, and llms-full.txt, the text of all
pages, into the site. Both follow its navigation. The title of the site has the version that its pages describe.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from markdown import Markdown  # type: ignore[import-untyped]
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

from strata import __version__

_PARAGRAPHS: Final = re.compile(r"\n\s*\n")
_NO_SENTENCE: Final = ("#", "|", "```", "<!--", "<", "- ", "!")
"""How paragraphs begin that do not say what a page is about."""
_LINK: Final = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_NAVIGATION: list[Navigation] = []
"""Of the build that runs: mkdocs gives it to one event, and the files are written at another."""


def on_config(config: MkDocsConfig, **_: object) -> None:
    config.site_name = f"{config.site_name} {__version__}"


def on_nav(nav: Navigation, **_: object) -> None:
    _NAVIGATION[:] = [nav]


def on_post_build(config: MkDocsConfig, **_: object) -> None:
    site = Path(config.site_dir)
    for name, text in documents(config, _NAVIGATION[0]).items():
        (site / name).write_text(text, encoding="utf-8")


def documents(config: MkDocsConfig, nav: Navigation) -> dict[str, str]:
    """The files by name."""
    index = [f"# {config.site_name}", f"> {config.site_description}"]
    whole = []
    for section in nav.items:
        lines = []
        for page in _pages(section):
            text = source_of(page, config)
            title = page.title or first_heading(text)
            lines.append(f"- [{title}]({page.url}): {first_sentence(text)}")
            # What scripts/api_pages.py makes is long, and nothing in it explains.
            if page.file.generated_by is None:
                whole.append(f"<!-- {page.file.src_uri} -->\n\n{text.strip()}")
        index += [f"## {section.title}", "\n".join(lines)]
    return {"llms.txt": "\n\n".join(index) + "\n", "llms-full.txt": "\n\n".join(whole) + "\n"}


def source_of(page: Page, config: MkDocsConfig) -> str:
    """The text of a page, with the files that it includes."""
    options = config.mdx_configs.get("pymdownx.snippets", {})
    markdown = Markdown(extensions=["pymdownx.snippets"], extension_configs={"pymdownx.snippets": options})
    return "\n".join(markdown.preprocessors["snippet"].run(page.file.content_string.split("\n")))


def first_heading(text: str) -> str:
    found = re.search(r"(?m)^# (.+)$", text)
    return found[1].strip() if found else ""


def first_sentence(text: str) -> str:
    """The sentence with which the page says what it is about, without marks."""
    paragraphs = (part.strip() for part in _PARAGRAPHS.split(text))
    prose = next((part for part in paragraphs if part and not part.startswith(_NO_SENTENCE)), "")
    plain = _LINK.sub(r"\1", " ".join(prose.split())).replace("**", "").replace("`", "")
    return re.split(r"(?<=[.:])\s", plain, maxsplit=1)[0]


def _pages(item: object) -> Iterator[Page]:
    if isinstance(item, Page):
        yield item
    for child in getattr(item, "children", None) or ():
        yield from _pages(child)
