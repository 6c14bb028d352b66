"""Names and log events are in the language of docs/glossary.md, and a public class name means one thing.

The lists below may only shrink: what is not found any more must be taken out, and nothing new may be put in without a
reason that holds.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Final

import pytest

from tests.rules import language

KEPT_NAMES: Final[Mapping[str, str]] = {
    "strata.coord.worker.stores.tell": "the position of a file object, as Python's `io` names it",
}
"""Names with a removed word, as `module.name`, and why they keep it."""

KEPT_EVENTS: Final[Mapping[str, str]] = {
    "strata.coord.worker.link": "a program that has configured no logs prints the event alone, so it names the address",
    "strata.coord.worker.torch_rendezvous": "the same for torchrun: it names the excluded host and the reason",
}
"""Log events that are no constant identifiers, by module, and why."""

HOMONYMS: Final[Mapping[str, str]] = {
    "Datum": "a datum as the public SDK takes it, and as the core carries it: one concept in two layers",
}
"""Public class names of several modules, and why each of them is right."""


def test_removed_words_stay_out_of_names() -> None:
    found = {
        f"{name.module}.{name.name}"
        for module, tree in language.sources()
        for name in language.removed_words(module, tree)
    }
    assert found - KEPT_NAMES.keys() == set(), "say it as docs/glossary.md does"
    assert KEPT_NAMES.keys() - found == set(), "take these out of the list: it may only shrink"


def test_log_events_are_stable_identifiers() -> None:
    events = [event for module, tree in language.sources() for event in language.log_events(module, tree)]
    print(f"{len(events)} log events in {len({event.module for event in events})} modules")
    assert len(events) > 100
    wrong = {event.module: str(event) for event in events if not language.is_event(event.name)}
    assert {module: event for module, event in wrong.items() if module not in KEPT_EVENTS} == {}
    assert KEPT_EVENTS.keys() - wrong.keys() == set(), "take these out of the list: it may only shrink"


def test_a_public_class_name_means_one_thing() -> None:
    found = language.homonyms()
    print(f"{len(found)} names of public classes mean two things")
    assert {name: modules for name, modules in found.items() if name not in HOMONYMS} == {}
    assert HOMONYMS.keys() - found.keys() == set(), "take these out of the list: it may only shrink"


def test_docstrings_begin_with_a_subject_or_a_verb() -> None:
    assert [str(found) for module, tree in language.sources() for found in language.fragments(module, tree)] == []


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ('"""Of a link."""\n', 1),
        ('SIZE = 1\n"""In bytes."""\n', 1),
        ('def size() -> int:\n    """What it takes."""\n', 1),
        ('def size() -> int:\n    """Returns what it takes."""\n', 0),
        ('SIZE = 1\n"""What it takes."""\n', 0),
        ('def size() -> int:\n    """Returns the size."""\n    return SIZE\n', 0),
    ],
)
def test_a_docstring_that_is_a_fragment_is_found(source: str, count: int) -> None:
    assert len(list(language.fragments("m", ast.parse(source)))) == count
