"""What may take long, in steps: each method is the same as the one of Core that its words name, for who gives others a turn
between two steps. Nothing but such turns may come between: a step leaves all laws in force."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

from kvstore.core import accepting, changes, ending, held, leaving, showing, writing
from kvstore.core.accepting import Settled
from kvstore.core.base import (
    CommitReport,
    Dropped,
    Ended,
    GivenBack,
    Gone,
    Relocated,
    ReserveItem,
    ReserveResult,
    Written,
)
from kvstore.core.changes import Change
from kvstore.core.live import Live
from kvstore.core.reservations import returned
from kvstore.core.steps import Steps
from kvstore.policy.base import EvictionPolicy
from kvstore.prefix.joined import JoinedKeys
from kvstore.store.base import Place
from kvstore.types import ItemId, Tier


class LongWork:
    """The part of Core that works in steps."""

    _live: Live

    def all_held(self) -> Steps[list[Change], None]:
        """All that is held when the first step begins, as if it had just come, parents before children; in steps."""
        return changes.all_held(self._live)

    def finding(self, namespace: bytes, keys: JoinedKeys) -> Steps[None, array[int]]:
        """The first part of `lookup`, which takes long where the prompt is: which of its blocks are held. For `lookup`, at once:
        nothing may come between. Raises UnknownNamespace."""
        return held.finding(self._live, self._live.namespaces.get(namespace), keys)

    def reserving(
        self,
        session: str,
        namespace: bytes,
        items: Sequence[ReserveItem],
        *,
        now_mono: float,
        now_wall: float,
    ) -> Steps[None, ReserveResult]:
        """As `reserve`, in steps. What a step has claimed is another's IN_FLIGHT at once; where a later one raises, all is
        given back. UnknownReservation where it ends between two steps, with its session or by a clear."""
        return writing.reserve(self._live, session, namespace, items, now_mono=now_mono, now_wall=now_wall)

    def committing(
        self,
        reservation_id: int,
        session: str,
        results: Mapping[ItemId, Written],
        *,
        now_mono: float,
        now_wall: float,
    ) -> Steps[None, CommitReport]:
        """As `committed`, in steps: each makes some more visible. To be run to its end; nothing may be relocated meanwhile."""
        found = self._live.reservations.get(reservation_id, session)
        return showing.commit(self._live, found, results, now_mono=now_mono, now_wall=now_wall)

    def settling(
        self, reservation_id: int, session: str, results: Mapping[ItemId, Written]
    ) -> Steps[Settled, None]:
        """The write is over: what was accepted lies where `results` say from now on; what they lack, and what follows something that
        is not durable, leaves, leased or not, with all that follows it. Before `committing`, with the same results. Each step tells what
        it has moved and taken back, the last one too."""
        found = self._live.reservations.get(reservation_id, session)
        return accepting.settle(self._live, found, results)

    def ending(self, session: str, now_mono: float) -> Steps[None, Ended]:
        """As `end_session`, in steps. The session is given nothing more meanwhile."""
        return ending.end_session(self._live, session, now_mono)

    def expiring_leases(self, now_mono: float) -> Steps[None, int]:
        """As `expire_leases`, in steps."""
        return ending.expire_leases(self._live, now_mono)

    def forgetting_claims(self) -> Steps[None, None]:
        """Let go of the memory of items whose reservations have ended."""
        return self._live.reservations.sweeping()

    def eviction(self, need_bytes: int, *, prefer_states: bool, now_wall: float) -> Steps[list[Gone], None]:
        """As `plan_eviction`, in steps."""
        return leaving.evict(self._live, need_bytes, prefer_states=prefer_states, now_wall=now_wall)

    def eviction_of(self, tenant: str, need_bytes: int, *, now_wall: float) -> Steps[list[Gone], int]:
        """Take about so many bytes of this tenant's out of the index, in steps: states before blocks, what was used longest ago
        first, nothing that is leased or built on. The payload bytes that left: fewer where no more may go."""
        numbers = self._live.namespaces.numbers_of(tenant)
        return leaving.evict_of(self._live, numbers, need_bytes, now_wall=now_wall)

    def switching_eviction(self, policy: EvictionPolicy) -> Steps[None, None]:
        """Let `policy`, which is empty, decide what is evicted first, over all that is held, in steps; until the last one the old
        one does. InvalidArgument while another is on its way in."""
        return self._live.ranks.switching(policy)

    def keeping_share(self, limit_bytes: int) -> Steps[list[Gone], None]:
        """As `states_over_share`, in steps."""
        return leaving.states_over_share(self._live, limit_bytes)

    def relocation(self, segment_id: int, moved: Mapping[Place, Place]) -> Steps[None, Relocated]:
        """As `relocate`, in steps: until the last one some items are still said to lie where they were. Nothing may be
        committed meanwhile."""
        return leaving.relocate(self._live, segment_id, moved)

    def void_reservations(self, namespace: bytes | None) -> Sequence[GivenBack]:
        """The last part of a clear: reservations end, and what is being written will not become visible."""
        live = self._live
        infos = live.namespaces.all() if namespace is None else [live.namespaces.get(namespace)]
        return returned([each for info in infos for each in live.reservations.void(info.digest)])

    def clearing(self, namespace: bytes | None) -> Steps[list[Gone], tuple[int, int]]:
        """The first part of a clear, in steps: tails go first, so that what is left is whole at each of them. How many blocks and
        states left. Nothing may be committed or relocated meanwhile."""
        live = self._live
        infos = live.namespaces.all() if namespace is None else [live.namespaces.get(namespace)]
        return leaving.clear(live, infos)

    def dropping(self, namespace: bytes | None, tier: Tier | None) -> Steps[list[Gone], Dropped]:
        """As `drop_states`, in steps, which tell what left the SSD: the result's `gone` is empty."""
        info = None if namespace is None else self._live.namespaces.get(namespace)
        return leaving.drop_states(self._live, info, tier)
