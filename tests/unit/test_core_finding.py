"""What is held of a long prompt is found in steps: the same as at once, whatever happens between two of them."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest

from kvstore.core import held as finding
from kvstore.prefix import JoinedKeys
from kvstore.types import BlockKey, ItemId, ItemKind
from tests.support.core import B, CoreRig

STEP = 40
BLOCKS = 2 * STEP + 10


@pytest.fixture(autouse=True)
def _short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "SLOTS_AT_ONCE", STEP)


class _Search:
    """A prompt of which `held` blocks are held, and a search that stands still between two steps."""

    def __init__(self, held: int) -> None:
        self.rig = CoreRig(per_segment=1 << 20)
        self.keys = self.rig.keys(range(BLOCKS * B))
        self.store(0, held)

    def store(self, first: int, end: int) -> None:
        items = self.rig.block_items(self.keys)[first:end]
        for part in range(0, len(items), 1000):
            self.rig.write(items[part : part + 1000])

    def forget(self, number: int) -> None:
        self.rig.core.forget(self.rig.main, ItemId(self.keys[number], ItemKind.BLOCK))

    def run(self, keys: list[BlockKey], after: Callable[[int], object] = lambda step: None) -> array[int]:
        """What is found; after(step) is called between the steps."""
        steps = self.rig.core.finding(self.rig.main, JoinedKeys(b"".join(keys)))
        count = 0
        while True:
            try:
                next(steps)
            except StopIteration as end:
                found: array[int] = end.value
                return found
            self.rig.core.check_integrity()
            after(count)
            count += 1

    def found(self, after: Callable[[int], object] = lambda step: None) -> int:
        """How many blocks are found, and that a lookup agrees."""
        found = self.run(self.keys, after)
        rig = self.rig
        now = rig.lookup(self.keys, BLOCKS * B + 1, lease=False)
        assert now.coverage.blocks == len(found)
        assert [rig.core._live.index.key(slot) for slot in found] == self.keys[: len(found)]
        return len(found)


@pytest.mark.parametrize("held", [0, 1, STEP, STEP + 1, BLOCKS - 1, BLOCKS])
def test_all_that_is_held_is_found(held: int) -> None:
    steps: list[int] = []
    assert _Search(held).found(steps.append) == held
    # Each part is walked, from the last block up, and then compared.
    assert len(steps) == (-(-(held - 1) // STEP) - (-held // STEP) if held > STEP else 0)


@pytest.mark.parametrize("step", range(4))
def test_what_comes_meanwhile_is_found(step: int) -> None:
    search = _Search(BLOCKS - 5)
    assert search.found(lambda now: now == step and search.store(BLOCKS - 5, BLOCKS)) == BLOCKS


@pytest.mark.parametrize("step", range(6))
@pytest.mark.parametrize("first", [BLOCKS - 1, 5, 0])
def test_what_leaves_meanwhile_is_not_found(step: int, first: int) -> None:
    search = _Search(BLOCKS)
    assert search.found(lambda now: now == step and search.forget(first)) == first


def test_blocks_that_left_and_came_again_are_found_where_they_are_now() -> None:
    search = _Search(BLOCKS)

    def again(step: int) -> None:
        if step == 2:
            search.forget(BLOCKS - 7)
            # As another call brings them: keys that are equal, and not the same objects.
            search.keys = [BlockKey(bytes(bytearray(key))) for key in search.keys]
            other = search.rig.keys(range(10**6, 10**6 + 3 * B))
            search.rig.write(search.rig.block_items(other))
            search.store(BLOCKS - 7, BLOCKS)

    assert search.found(again) == BLOCKS


def test_keys_that_are_no_chain_are_found_up_to_where_they_part() -> None:
    search = _Search(BLOCKS)
    keys = search.keys
    assert len(search.run([*keys[:60], keys[59], *keys[61:]])) == 60


def test_a_lookup_of_what_was_found_answers_as_one_that_finds_it() -> None:
    search = _Search(BLOCKS - 3)
    rig = search.rig
    found = search.run(search.keys)
    one, other = (
        rig.core.lookup(
            rig.main,
            search.keys,
            prompt_tokens=BLOCKS * B + 1,
            costs=rig.lookup(search.keys, BLOCKS * B + 1, lease=False).costs,
            session="r",
            lease=False,
            held=held,
            **rig.now,
        )
        for held in (found, None)
    )
    assert one == other
    assert one.coverage.blocks == BLOCKS - 3
