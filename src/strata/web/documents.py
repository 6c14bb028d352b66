"""The documents as the dashboard shows them: the pages that lie in the wheel (`hatch_build.py`), or those of the clone.

They are the same for everybody and need neither a session nor a network. Pictures are left out: they are in the
documents that `make docs` builds.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

from jinja2 import Environment
from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup, escape

from strata.http.route import PUBLIC, Handler, HttpCall, RawReply, Route

HOME: Final = "index.md"
BASE: Final = "/documents/"
_PACKAGED: Final = Path(__file__).parents[1] / "documents"
_CLONE: Final = Path(__file__).parents[3]
_SNIPPET: Final = re.compile(r'(?m)^--8<-- "([\w.]+)(?::(\w+))?"$')
_SECTION: Final = r"<!-- --8<-- \[start:{0}\] -->\n(.*?)<!-- --8<-- \[end:{0}\] -->"
_NOT_SHOWN: Final = re.compile(r"(?m)^<!--[^\n]*-->\n|^<picture>[^\n]*$")
_ID: Final = re.compile(r"\s*\{#([\w-]+)\}\s*$")
_TITLE: Final = re.compile(r'title="([^"]+)"')
_LINK: Final = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_WORDS: Final = re.compile(r"[`*]|\s*\{#[\w-]+\}\s*$")


@dataclass(frozen=True)
class DocumentPage:
    path: str
    """Is relative to the folder of the documents."""
    title: str
    html: Markup


class DocumentPages:
    """The pages of a folder that has `docs` and the files that its pages include."""

    def __init__(self, root: Path) -> None:
        folder = root / "docs"
        self._root = root
        self._files: Mapping[str, Path] = {
            path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.md"))
        }
        self._markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
        self._markdown.add_render_rule("image", _without_picture)
        self._markdown.add_render_rule("fence", _block)

    @property
    def paths(self) -> Sequence[str]:
        return tuple(self._files)

    @functools.cached_property
    def titles(self) -> Mapping[str, str]:
        """Maps path to title, in the order of the folders."""
        ordered = sorted(self._files, key=lambda path: (path.count("/"), path != HOME, path))
        return {path: _title(self._text(path)) or path for path in ordered}

    @functools.lru_cache(maxsize=256)  # noqa: B019 (lives as long as the server)
    def page(self, path: str) -> DocumentPage:
        """Returns one of `paths`."""
        tokens = self._markdown.parse(_NOT_SHOWN.sub("", self._text(path)))
        self._name_headings(tokens)
        self._keep_links(tokens, path)
        html = self._markdown.renderer.render(tokens, self._markdown.options, {})
        # Markup of our own documents, in which HTML is text.
        return DocumentPage(path, self.titles[path], Markup(html))  # noqa: S704

    def _text(self, path: str) -> str:
        return _SNIPPET.sub(self._snippet, self._files[path].read_text(encoding="utf-8"))

    def _snippet(self, match: re.Match[str]) -> str:
        text = (self._root / match[1]).read_text(encoding="utf-8")
        if match[2] is None:
            return text
        section = re.search(_SECTION.format(match[2]), text, re.DOTALL)
        assert section is not None, f"{match[1]} has no section {match[2]}"
        return section[1]

    def _name_headings(self, tokens: Sequence[Token]) -> None:
        """Give headings the ids that links name."""
        used: dict[str, int] = {}
        for opening, inline in itertools.pairwise(tokens):
            if opening.type != "heading_open":
                continue
            if (own := _ID.search(inline.content)) is not None:
                inline.content = inline.content[: own.start()]
                assert inline.children
                inline.children[-1].content = _ID.sub("", inline.children[-1].content)
            name = own[1] if own else _slug(inline.content)
            used[name] = used.get(name, -1) + 1
            opening.attrSet("id", f"{name}_{used[name]}" if used[name] else name)

    def _keep_links(self, tokens: Sequence[Token], path: str) -> None:
        """Leave the text alone of a link to what is not here, as a page that is made while the site is built."""
        for inline in tokens:
            hidden = False
            for token in inline.children or ():
                if token.type == "link_open":
                    hidden = not self._is_here(str(token.attrGet("href")), path)
                if token.type in ("link_open", "link_close"):
                    token.hidden = hidden

    def _is_here(self, target: str, path: str) -> bool:
        if "://" in target:
            return True
        file = target.partition("#")[0]
        return not file or _resolve(file, path) in self._files


def _resolve(target: str, path: str) -> str:
    parts = list(PurePosixPath(path).parent.parts)
    for part in PurePosixPath(target).parts:
        if part != "..":
            parts.append(part)
        elif parts:
            parts.pop()
    return "/".join(parts)


def _title(text: str) -> str:
    found = re.search(r"(?m)^# (.+)$", text)
    return _LINK.sub(r"\1", _WORDS.sub("", found[1])) if found else ""


def _slug(heading: str) -> str:
    """Makes an id as Python-Markdown does, whose links the documents have."""
    text = _LINK.sub(r"\1", heading)
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def _without_picture(*_: Any) -> str:
    return ""


def _block(_: Any, tokens: Sequence[Token], index: int, *__: Any) -> str:
    token = tokens[index]
    title = _TITLE.search(token.info)
    heading = Markup('<p class="meta">{}</p>').format(title[1]) if title else ""
    return f'{heading}<pre tabindex="0"><code>{escape(token.content)}</code></pre>\n'


def find_documents() -> DocumentPages:
    """Returns those of the wheel or of the clone; none where a wheel was built without them."""
    is_clone = (_CLONE / "hatch_build.py").is_file()
    return DocumentPages(_CLONE if is_clone else _PACKAGED)


def document_routes(documents: DocumentPages, environment: Environment, headers: Mapping[str, str]) -> Iterator[Route]:
    """One for each page: what needs no session has no parameter in its path."""
    template = environment.get_template("document.html")

    def handler_of(path: str) -> Handler:
        async def show_document(call: HttpCall[Any]) -> RawReply:
            """A page of the documents."""
            del call
            # A long page takes a tenth of a second, once.
            page = await asyncio.to_thread(documents.page, path)
            html = template.render(page=page, titles=documents.titles, base=BASE)
            return RawReply(html.encode(), media_type="text/html; charset=utf-8", headers=headers)

        return show_document

    for path in documents.paths:
        yield Route("GET", BASE + path, PUBLIC, handler_of(path), operation="web.show_document")
