"""The documents in the dashboard: a link on every page, pages that need no session, and links that lead somewhere."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Final
from urllib.parse import urldefrag, urljoin, urlsplit

import pytest

from strata.http.route import signature_of
from strata.web.documents import BASE, HOME, DocumentPages, find_documents
from strata.web.page import View
from strata.web.routes import PAGES
from tests.shell.fleet_http.running import Running
from tests.shell.web.browsing import HTML, Tags, log_in
from tests.shell.web.test_pages import queued

ROOT: Final = Path(__file__).parents[3]
TEMPLATES: Final = ROOT / "src/strata/web/templates"
PLAIN: Final = sorted(
    route.path
    for page in PAGES
    for route in page.ROUTES
    if route.method == "GET" and "{" not in route.path and signature_of(route.handler).reply is View
)
"""The pages of the hub that an address without an id opens."""
FRAMES: Final = {"base.html", "document.html", "error.html", "login.html"}
"""Templates that make whole pages. All others are content in the frame of `base.html`."""


def links(html: str, url: str = "/") -> set[str]:
    """Where a page leads on this server, and in the page."""
    found = {urljoin(url, values["href"]) for tag, values in Tags(html).elements if tag == "a" and "href" in values}
    return {each for each in found if not urlsplit(each).netloc}


def ids(html: str) -> set[str]:
    return {values["id"] for _, values in Tags(html).elements if "id" in values}


async def test_every_page_has_a_link_to_the_documents(site: Running) -> None:
    browser = await log_in(site, "researcher")
    job_id = await queued(site, "rosa")
    assert "/hosts" in PLAIN
    for path in [*PLAIN, f"/jobs/{job_id}", "/nowhere", "/jobs/job1_0", "/login"]:
        assert BASE + HOME in links((await browser.get(path)).text), path


def test_no_template_makes_a_whole_page_but_those_that_have_the_link() -> None:
    texts = {path.name: path.read_text() for path in TEMPLATES.glob("*.html")}
    whole = {name for name, text in texts.items() if "layout.html" in text or "<body" in text}
    assert whole - {"layout.html"} == FRAMES
    for name in FRAMES - {"base.html"}:
        assert '<a href="{{ documents }}">' in texts[name], name


async def test_the_documents_need_no_session_and_know_no_other_files(site: Running) -> None:
    client = await site.client()
    reply = await client.get(BASE + HOME, headers=HTML)
    assert reply.status_code == 200
    assert '<h1 id="strata">Strata</h1>' in reply.text
    for path in ("../pyproject.toml", "%2e%2e/pyproject.toml", "/etc/passwd", "index.md/..", "", "vectors"):
        assert (await client.get(BASE + path, headers=HTML)).status_code in (303, 404), path


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    """The documents of this clone by their addresses."""
    documents = find_documents()
    return {BASE + path: documents.page(path).html for path in documents.paths}


def test_every_link_of_the_documents_leads_to_a_page_and_a_heading(pages: dict[str, str]) -> None:
    assert {BASE + HOME, BASE + "how-to/run-a-script.md", BASE + "reference/commands.md"} <= pages.keys()
    headings = {url: ids(html) | {""} for url, html in pages.items()}
    targets = {(url, *urldefrag(target)) for url, html in pages.items() for target in links(html, url)}
    assert not {each for each in targets if each[2] not in headings.get(each[1], ())}


class Text(HTMLParser):
    """What a page shows outside of code."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.shown = ""
        self._code = 0
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._code += tag == "code"

    def handle_endtag(self, tag: str) -> None:
        self._code -= tag == "code"

    def handle_data(self, data: str) -> None:
        self.shown += "" if self._code else data


def test_no_mark_is_left_in_the_text(pages: dict[str, str]) -> None:
    marks = re.compile(r"--8<--|<!--|<picture|\{#|\]\(")
    assert [url for url, html in pages.items() if marks.search(Text(html).shown)] == []


def test_a_page_includes_what_it_names_and_html_stays_text(tmp_path: Path) -> None:
    (tmp_path / "docs" / "deep").mkdir(parents=True)
    (tmp_path / "README.md").write_text("no\n<!-- --8<-- [start:part] -->\n**yes**\n<!-- --8<-- [end:part] -->\nno\n")
    (tmp_path / "docs" / "index.md").write_text(
        '# A `page` {#own}\n\n--8<-- "README.md:part"\n\n<b>bold</b> [there](deep/one.md#x) [lost](gone.md)'
        '\n\n[bad](javascript:alert)\n\n```sh title="run.sh"\na < b\n```\n'
    )
    (tmp_path / "docs" / "deep" / "one.md").write_text("# One\n\n## Twice\n\n## Twice\n\n[up](../index.md)\n")
    documents = DocumentPages(tmp_path)
    page = documents.page("index.md")
    assert (page.title, documents.titles["deep/one.md"]) == ("A page", "One")
    assert '<h1 id="own">A <code>page</code></h1>' in page.html
    assert "<strong>yes</strong>" in page.html
    assert ">no" not in page.html
    assert "&lt;b&gt;bold&lt;/b&gt;" in page.html
    assert links(page.html) == {"/deep/one.md#x"}
    assert "lost" in page.html
    assert '<p class="meta">run.sh</p><pre tabindex="0"><code>a &lt; b' in page.html
    deep = documents.page("deep/one.md").html
    assert ids(deep) == {"one", "twice", "twice_1"}
    assert links(deep, "/deep/one.md") == {"/index.md"}


def test_a_wheel_that_was_built_without_documents_has_none(tmp_path: Path) -> None:
    assert DocumentPages(tmp_path).paths == ()
