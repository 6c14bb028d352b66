"""The diagrams in the document of the coordinator show what its core does."""

from __future__ import annotations

import dataclasses

import pytest

from strata.coord.core.inputs import Leave
from tests.rules.diagrams import BARRIER, BEGIN, DOCUMENT, END, MACHINES, WORKER, A, Edge, always, drawn, replaced, walk


def test_the_diagrams_are_those_of_the_core() -> None:
    document = DOCUMENT.read_text(encoding="utf-8")
    assert replaced(document, drawn()) == document, "make diagrams"


def test_a_transition_that_the_core_does_not_make_is_not_drawn() -> None:
    only_leaves = dataclasses.replace(WORKER, moves=(WORKER.moves[0], always(Leave(A))))
    assert walk(only_leaves) == [
        Edge("unknown", "Register", "WorkerJoined", "waiting"),
        Edge("waiting", "Leave", "WorkerLost: left", "gone"),
        Edge("gone", "Register", "WorkerJoined", "waiting"),
    ]


def test_a_verdict_is_final() -> None:
    assert {edge.start for edge in walk(BARRIER)} == {"not there", "open"}


def test_every_machine_is_drawn_once() -> None:
    part = drawn(MACHINES[:1])
    assert part.startswith(BEGIN)
    assert part.endswith(END)
    assert part.count("**A job.**") == 1


@pytest.mark.parametrize("document", ["no marks", f"only {BEGIN}", f"only {END}"])
def test_a_document_without_both_marks_is_refused(document: str) -> None:
    with pytest.raises(ValueError, match="lacks"):
        replaced(document, "part")
