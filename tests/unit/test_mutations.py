"""`make mutations` breaks lines by their text: each must still be there, or it would break nothing."""

from __future__ import annotations

import pytest

from ops.mutations import MUTATIONS, ROOT, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_what_a_mutation_changes_is_there_once(mutation: Mutation) -> None:
    assert (ROOT / mutation.file).read_text(encoding="utf-8").count(mutation.old) == 1
    assert mutation.new != mutation.old
    for test in mutation.tests:
        assert (ROOT / test.partition("::")[0]).exists(), test
