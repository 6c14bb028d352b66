"""docs/glossary.md names modules that exist, and defines each term once."""

from __future__ import annotations

import re
from collections import Counter

from tests.rules.language import ROOT, sources

GLOSSARY = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
ROWS = [line.strip("|").split("|") for line in GLOSSARY.splitlines() if line.startswith("| ")]
TERMS = [row for row in ROWS if row[0].strip() != "Term"]


def test_every_term_lives_in_a_module_that_exists() -> None:
    modules = {module for module, _ in sources()}
    named = {row[0].strip(): re.findall(r"`(strata[\w.]*)`", row[3]) for row in TERMS}
    assert {term: where for term, where in named.items() if len(where) != 1 or where[0] not in modules} == {}


def test_every_term_is_defined_once_in_a_sentence() -> None:
    terms = Counter(term.strip() for row in TERMS for term in row[0].split(","))
    assert len(terms) >= 60
    assert [term for term, times in terms.items() if times > 1] == []
    meanings = [row[1].strip() for row in TERMS]
    assert all(meaning.endswith(".") for meaning in meanings)
