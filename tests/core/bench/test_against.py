"""An older commit is built from the history, or the reason is said why it cannot be."""

from __future__ import annotations

import pytest

from bench.against import checkout


def test_a_commit_that_the_history_lacks_is_an_error_that_says_what_to_fetch() -> None:
    with pytest.raises(RuntimeError, match=f"no commit {'0' * 40}: fetch it"), checkout("0" * 40):
        pass
