"""Which slots of memory stay for whom: a lease keeps what was mapped under it until it ends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvstore.memory import BlockCache, Slot


@dataclass(eq=False, slots=True)
class _Kept:
    slots: dict[Slot, None] = field(default_factory=dict)
    """In the order of the prompt."""
    state: Slot | None = None
    """A copy of the state of the pool that the lease covers."""


class Pins:
    """Slots by lease, each pinned once for it however often it is asked for. Only leases that have not ended are given
    slots: nothing ends twice."""

    def __init__(self, memory: BlockCache) -> None:
        self._memory = memory
        self._kept: dict[int, _Kept] = {}
        self.slots = 0
        """Pinned by all leases; what two of them have counts twice."""

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, lease_id: int, slots: Iterable[Slot]) -> None:
        """They stay until the lease ends. Who calls has them pinned, or found them just now."""
        kept = self._of(lease_id)
        fresh = [slot for slot in dict.fromkeys(slots) if slot not in kept.slots]
        self._memory.pin(fresh)
        kept.slots.update(dict.fromkeys(fresh))
        self.slots += len(fresh)

    def keep_state(self, lease_id: int, slot: Slot) -> Slot:
        """Take over a pin of a copy of the lease's state from the pool; the copy that stays, which is the first one."""
        kept = self._of(lease_id)
        if kept.state is not None:
            self._memory.unpin([slot])
            return kept.state
        kept.state = slot
        self.slots += 1
        return slot

    def state(self, lease_id: int) -> Slot | None:
        kept = self._kept.get(lease_id)
        return None if kept is None else kept.state

    def give_back(self, slot: Slot) -> None:
        """A pinned slot that no lease takes over."""
        self._memory.unpin([slot])

    def end(self, lease_id: int) -> None:
        """The lease has ended: nothing stays for it any more."""
        kept = self._kept.pop(lease_id, None)
        if kept is None:
            return
        if kept.state is not None:
            kept.slots[kept.state] = None
        self.slots -= len(kept.slots)
        # Tails go before what they build on.
        self._memory.unpin(reversed(kept.slots))

    def _of(self, lease_id: int) -> _Kept:
        kept = self._kept.get(lease_id)
        if kept is None:
            kept = self._kept[lease_id] = _Kept()
        return kept
