"""docs/glossary.md defines each term once; it and the other documents name modules and files that exist."""

from __future__ import annotations

import re
from collections import Counter

from tests.rules.language import ROOT, modules

RECORDS = {"CHANGELOG.md", "docs/proof.md", "docs/campaign-record.md", "docs/campaigns.md"}
"""They tell what was so at the time."""

GLOSSARY = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
ROWS = [line.strip("|").split("|") for line in GLOSSARY.splitlines() if line.startswith("| ")]
TERMS = [row for row in ROWS if row[0].strip() != "Term"]


def test_every_term_lives_in_a_module_that_exists() -> None:
    named = {row[0].strip(): re.findall(r"`(strata[\w.]*)`", row[3]) for row in TERMS}
    assert {term: where for term, where in named.items() if len(where) != 1 or where[0] not in modules()} == {}


def test_every_term_is_defined_once_in_a_sentence() -> None:
    terms = Counter(term.strip() for row in TERMS for term in row[0].split(","))
    assert len(terms) >= 60
    assert [term for term, times in terms.items() if times > 1] == []
    meanings = [row[1].strip() for row in TERMS]
    assert all(meaning.endswith(".") for meaning in meanings)


def test_documents_name_modules_and_files_that_exist() -> None:
    missing = set()
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")):
        name = str(path.relative_to(ROOT))
        if name in RECORDS:
            continue
        text = path.read_text(encoding="utf-8")
        named = set(re.findall(r"`(strata(?:\.[a-z_0-9]+)+)", text))
        missing |= {(name, each) for each in named if not {each, each.rpartition(".")[0]} & modules().keys()}
        files = {
            each.rstrip("./") for each in re.findall(r"(?<![\w/])((?:src/strata|tests|soak|bench)/[\w./-]+)", text)
        }
        missing |= {(name, file) for file in files if not (ROOT / file).exists()}
    assert missing == set()
