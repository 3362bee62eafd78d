"""Long prompts are handled by columns: the answers and the order of eviction are those of going step by step."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import pytest

from kvstore.core import LookupResult, index, live
from kvstore.plan.figures import figures_of
from kvstore.plan.work import replay_scanned, seen
from kvstore.policy import LruPolicy
from kvstore.prefix import JoinedKeys
from kvstore.profile.registry import PROFILES
from kvstore.types import BlockKey
from tests.support.core import B, CoreRig

LONG = 3 * index.MANY_SLOTS


class _Story:
    """Two prompts that share a beginning, looked up at many moments."""

    def __init__(self) -> None:
        self.rig = CoreRig(per_segment=64)
        self.one = self._stored([*range(LONG * B)])
        self.two = self._stored([*range(LONG // 2 * B), *range(10**6, 10**6 + LONG // 2 * B)])
        self.found: list[LookupResult] = []

    def _stored(self, tokens: list[int]) -> list[BlockKey]:
        return self.rig.store(tokens, ssd=[len(tokens) // 2], rows=[3, 4, 5], pool=[len(tokens)])

    def tell(self) -> tuple[object, ...]:
        """Everything that can be seen of it in the end."""
        rig = self.rig
        keys: Sequence[bytes]
        for step, (keys, blocks, seconds) in enumerate(
            [
                (self.one, LONG, 5),
                (self.two, LONG, 0),
                (self.one, LONG, 3700),
                (self.two[:250], 250, 1),
                (self.one, LONG, 0),
                (self.two, LONG, 7200),
                ([*self.one[:300], *self.two[300:]], LONG, 1),
                ([*self.one[1:], self.one[0]], LONG, 1),
                ([*self.one[:-1], self.two[-1]], LONG, 1),
            ]
        ):
            rig.clock.advance(seconds)
            given = JoinedKeys(b"".join(keys)) if step % 2 else keys
            self.found.append(rig.lookup(given, blocks * B + 1))
            rig.core.check_integrity()
        uses = list(rig.core.take_uses())
        again = rig.lookup(self.one, LONG * B + 1)
        for lease in [each.lease_id for each in [*self.found, again] if each.lease_id is not None]:
            rig.core.release(lease, "r", rig.clock.monotonic())
        return self.found, uses, list(rig.core.take_uses()), rig.evict(2 * LONG)


def test_columns_and_steps_come_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    by_columns = _Story().tell()
    monkeypatch.setattr(index, "MANY_SLOTS", 10**9)
    monkeypatch.setattr(live, "MANY_SLOTS", 10**9)
    assert by_columns == _Story().tell()
    found = by_columns[0]
    assert isinstance(found, list)
    held = [each.coverage.blocks for each in found]
    assert held == [LONG, LONG, LONG, 250, LONG, LONG, LONG, 0, LONG - 1]


def test_many_handles_are_ranked_as_one_after_another() -> None:
    chance = random.Random(5)
    for _ in range(200):
        one, other = LruPolicy(), LruPolicy()
        for handle in chance.sample(range(60), 60):
            one.on_insert(handle)
            other.on_insert(handle)
        for _ in range(5):
            chosen = chance.sample(range(60), chance.randint(2, 59))
            if chance.random() < 0.5:
                chosen = list(range(chance.randint(0, 20), chance.randint(30, 59)))
            below = chance.choice([-1, *(set(range(60)) - set(chosen))])
            one.on_touch(chosen, below)
            other.on_touch_many(np.array(chosen, np.int32), below)
            other.check_integrity()
            assert list(one.victims()) == list(other.victims())


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_what_a_replay_scans_is_summed_up_exactly(name: str) -> None:
    figures = figures_of(PROFILES[name])
    chance = random.Random(name)
    for _ in range(500):
        end = chance.randrange(chance.choice([200, 5_000, 1_000_000]))
        start = chance.randint(max(0, end - 6_000), end)
        wanted = 0
        for scan in figures.scans:
            near = bisect_left(scan.reaches, end - start)
            wanted += len(scan.reaches) * seen(scan.ratio, end)
            wanted -= (len(scan.reaches) - near) * seen(scan.ratio, start)
            wanted -= sum(seen(scan.ratio, end - reach) for reach in scan.reaches[:near])
        assert replay_scanned(figures, start, end) == wanted
