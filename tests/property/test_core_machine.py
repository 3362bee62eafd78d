"""The core against a plain dict: any sequence of events, the laws checked after each one."""

from __future__ import annotations

import math

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from kvstore.core import FetchItem, Gone, ReserveOutcome, Written
from kvstore.core.accepted import accepted_place, is_accepted
from kvstore.plan import Coverage
from kvstore.profile.layout import rows_edge, rows_needed
from kvstore.store.base import Place
from kvstore.types import BlockKey, ItemId, ItemKind, Lineage, NamespaceDigest, StateSource, Tier
from tests.support.core import TINY, B, CoreRig, checks_of, identity
from tests.support.core_model import Block, Kept, LeaseModel, Model, Name, ReservationModel
from tests.support.long import examples

RETENTION = 72 * 3600.0
SESSIONS = st.sampled_from(["a", "b"])
# Weighted so that most chains are stored, shared and found again.
SPACES = st.sampled_from([0, 0, 0, 1])
PATHS = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=5).map(tuple)
LINEAGES = st.sampled_from([Lineage.EXACT, Lineage.EXACT, Lineage.BOUNDED])


class CoreMachine(RuleBasedStateMachine):
    reservations = Bundle("reservations")
    leases = Bundle("leases")

    @initialize()
    def start(self) -> None:
        self.rig = CoreRig(per_segment=5)
        self.rig.pool._ttl = 1e9
        other = self.rig.core.open_namespace("other", identity(adapter="o"))
        self.digests: list[NamespaceDigest] = [self.rig.main, other.digest]
        self.model = Model()

    # ---- helpers --------------------------------------------------------------------------------------------

    def keys(self, space: int, path: tuple[int, ...]) -> list[BlockKey]:
        return self.rig.keys([1 + step for step in path for _ in range(B)], self.digests[space])

    def gone(self, left: list[Gone], *, by_force: bool = False) -> None:
        for each in left:
            name = (self.digests.index(each.namespace), each.item.key)
            if each.item.kind is not ItemKind.BLOCK:
                kept = (name, each.item.kind)
                assert self.model.ssd[kept][1] == each.place
                assert by_force or not self.model.state_is_leased(kept, Tier.SSD)
                self.model.lose_state(kept, Tier.SSD)
            else:
                assert self.model.blocks[name].place == each.place
                assert by_force or not (self.model.is_leased(name) or self.model.is_built_on(name))
                assert by_force or not self.model.is_accepted(name)
                self.model.lose_block(name)

    def replaceable(self, name: Name, lineage: Lineage) -> bool:
        held = self.model.blocks[name].lineage
        return lineage is Lineage.EXACT and held is Lineage.BOUNDED and not self.model.is_leased(name)

    def state_replaceable(self, kept: Kept, lineage: Lineage, length: int) -> bool:
        held, place = self.model.ssd[kept]
        better = lineage is Lineage.EXACT and held is Lineage.BOUNDED
        fuller = lineage is held and length > place.length
        return (better or fuller) and not self.model.state_is_leased(kept, Tier.SSD)

    def pool_replaceable(self, name: Name, lineage: Lineage) -> bool:
        return (
            lineage is Lineage.EXACT
            and self.model.pool[name] is Lineage.BOUNDED
            and not self.model.state_is_leased((name, ItemKind.STATE), Tier.POOL)
        )

    # ---- writing --------------------------------------------------------------------------------------------

    @rule(
        target=reservations,
        session=SESSIONS,
        space=SPACES,
        path=PATHS,
        first=st.sampled_from([0, 0, 0, 0, 1, 2]),
        lineage=LINEAGES,
        tiers=st.sampled_from([(False, False), (True, False), (False, True), (True, True)]),
        rows=st.sampled_from([None, None, False, True]),
        commit=st.sampled_from([True, True, False]),
    )
    def reserve(
        self,
        *,
        session: str,
        space: int,
        path: tuple[int, ...],
        first: int,
        lineage: Lineage,
        tiers: tuple[bool, bool],
        rows: bool | None,
        commit: bool,
    ) -> object:
        keys, digest = self.keys(space, path), self.digests[space]
        items = self.rig.block_items(keys, lineage=lineage, namespace=digest)[first:]
        if any(tiers):
            items.append(
                self.rig.state_item(keys, len(keys) * B, pool=tiers[0], ssd=tiers[1], lineage=lineage)
            )
        if rows is not None:
            items += [
                self.rig.rows_item(keys, number, overlap=rows, lineage=lineage)
                for number in range(first, len(keys))
            ]
        made = self.rig.reserve(items, session=session, namespace=digest)
        granted: list[tuple[ItemId, Name | None, Lineage, bool, bool, int]] = []
        promised = {
            (m.space, i.key)
            for m in self.model.reservations.values()
            if m.session == session and not m.is_void
            for i, *_ in m.items
            if i.kind is ItemKind.BLOCK
        }
        now = self.rig.clock.wall()
        mine: set[Name] = set()
        builds_on: set[Name] = set()
        for item, got in zip(items, made.outcomes, strict=True):
            name = (space, item.key)
            held = name in self.model.blocks
            if held:
                self.model.use(name, now)
            to_pool, to_ssd = item.to_pool, item.to_ssd
            if item.kind is ItemKind.BLOCK:
                is_root = item.parent == digest
                parent: Name | None = None if is_root else (space, BlockKey(item.parent))
                done = held and not self.replaceable(name, lineage)
                ready = is_root or parent in self.model.blocks or parent in promised
            else:
                parent = None
                kept = (name, item.kind)
                to_pool = to_pool and (name not in self.model.pool or self.pool_replaceable(name, lineage))
                to_ssd = to_ssd and (
                    kept not in self.model.ssd or self.state_replaceable(kept, lineage, item.length)
                )
                done = held and not (to_pool or to_ssd)
                ready = held or name in promised
            flying = self.model.in_flight(space, item.item_id)
            waits = (
                self.model.is_accepted(name)
                if item.kind is ItemKind.BLOCK
                else item.to_ssd and self.model.state_is_accepted((name, item.kind))
            )
            if done and waits:
                assert flying is not None, "what is not durable is being written"
                expected = ReserveOutcome.IN_FLIGHT
            elif done:
                expected = ReserveOutcome.HELD
            elif item.kind is not ItemKind.BLOCK and not ready:
                expected = ReserveOutcome.PARENT_MISSING
            elif flying is not None:
                expected = ReserveOutcome.IN_FLIGHT
            elif not ready:
                expected = ReserveOutcome.PARENT_MISSING
            else:
                expected = ReserveOutcome.GRANTED
                granted.append((item.item_id, parent, lineage, to_pool, to_ssd, item.length))
                on = parent if item.kind is ItemKind.BLOCK else name
                if on is not None and (on in self.model.blocks or on not in mine):
                    builds_on.add(on)
                if item.kind is ItemKind.BLOCK:
                    promised.add(name)
                    mine.add(name)
                    if parent in self.model.blocks:
                        self.model.use(parent, now)
            assert got.outcome is expected, f"{item.kind.name} at {item.position}"
        assert (made.reservation_id is None) == (not granted)
        if made.reservation_id is None:
            return multiple()
        self.model.reservations[made.reservation_id] = ReservationModel(
            session, space, granted, self.rig.clock.monotonic() + 60, builds_on
        )
        if commit:
            self.commit(made.reservation_id, False)
            return multiple()
        return made.reservation_id

    @rule(number=consumes(reservations), drop_first=st.booleans())
    def commit(self, number: int, drop_first: bool) -> None:
        made = self.model.reservations.pop(number, None)
        if made is None:
            return
        core, now = self.rig.core, self.rig.clock.wall()
        results: dict[ItemId, Written] = {}
        listed = core.commit_list(number, made.session)
        assert [(g.item.item_id, g.item.to_pool, g.item.to_ssd) for g in listed] == [
            (item, pool, ssd if item.kind is ItemKind.STATE else True)
            for item, _, _, pool, ssd, _ in made.items
        ]
        for granted in listed[int(drop_first) :]:
            results[granted.item.item_id] = self.rig.written(granted.item)
        self.settle(number, made, results)
        report = core.committed(number, made.session, results, **self.rig.now)
        visible, discard = [], []
        for item, parent, lineage, to_pool, to_ssd, length in made.items:
            written, name = results.get(item), (made.space, item.key)
            if written is None:
                continue
            if made.is_void:
                discard += [written.place] if written.place is not None else []
                continue
            held = name in self.model.blocks
            if item.kind is ItemKind.BLOCK:
                assert written.place is not None
                if held and self.model.blocks[name].place == written.place:
                    visible.append(item)
                    self.model.use(name, now)
                elif held:
                    visible.append(item)
                    self.model.use(name, now)
                    block = self.model.blocks[name]
                    discard.append(block.place if self.replaceable(name, lineage) else written.place)
                    if self.replaceable(name, lineage):
                        block.place, block.lineage = written.place, lineage
                elif parent is None or (parent in self.model.blocks and not self.model.is_accepted(parent)):
                    visible.append(item)
                    self.model.blocks[name] = Block(parent, lineage, written.place, now)
                    self.model.use(name, now)
                else:
                    discard.append(written.place)
            elif not held:
                discard += [written.place] if to_ssd else []
            elif to_ssd and self.model.is_accepted(name):
                # Its block's commit began later, and it is not durable before that one is.
                self.model.use(name, now)
                assert written.place is not None
                discard.append(written.place)
                if to_pool:
                    visible.append(item)
            else:
                visible.append(item)
                self.model.use(name, now)
                if to_ssd:
                    kept = (name, item.kind)
                    if kept in self.model.ssd and self.model.ssd[kept][1] == written.place:
                        pass
                    elif kept in self.model.ssd and not self.state_replaceable(kept, lineage, length):
                        discard.append(written.place)
                    else:
                        if kept in self.model.ssd:
                            discard.append(self.model.ssd[kept][1])
                            self.model.lose_state(kept, Tier.SSD)
                        self.model.ssd[kept] = (lineage, written.place)
            if to_pool and held and (name not in self.model.pool or self.pool_replaceable(name, lineage)):
                self.model.pool[name] = lineage
        assert list(report.visible) == visible
        assert list(report.discard) == discard

    @rule(number=reservations, drop_first=st.booleans())
    def accept(self, number: int, drop_first: bool) -> None:
        made = self.model.reservations.get(number)
        if made is None or made.is_writing:
            return
        core, now = self.rig.core, self.rig.clock.wall()
        arrived = [
            (each, Written(checks_of(each.item.key), None, self.rig.written(each.item).payload))
            for each in core.commit_list(number, made.session)
        ][int(drop_first) :]
        visible = core.accept(number, made.session, arrived, **self.rig.now)
        made.is_writing, expected = True, []
        for granted, _ in arrived:
            item, name = granted.item.item_id, (made.space, granted.item.key)
            place = accepted_place(number, granted.index, granted.item.length)
            parent = None
            if item.kind is ItemKind.BLOCK:
                if granted.item.parent != self.digests[made.space]:
                    parent = (made.space, BlockKey(granted.item.parent))
                if name in self.model.blocks or not (parent is None or parent in self.model.blocks):
                    continue
                self.model.blocks[name] = Block(parent, granted.item.lineage, place, now)
                made.accepted.append(item)
            else:
                kept = (name, item.kind)
                if name not in self.model.blocks or (granted.item.to_ssd and kept in self.model.ssd):
                    continue
                if granted.item.to_ssd:
                    self.model.ssd[kept] = (granted.item.lineage, place)
                    made.accepted.append(item)
                if granted.item.to_pool and (
                    name not in self.model.pool or self.pool_replaceable(name, granted.item.lineage)
                ):
                    self.model.pool[name] = granted.item.lineage
            self.model.use(name, now)
            expected.append(item)
        assert visible == expected

    def settle(self, number: int, made: ReservationModel, results: dict[ItemId, Written]) -> None:
        """What was accepted is durable where it was written and all above it is durable; else it is gone, with all below it."""
        moved: dict[Place, Place] = {}
        lost: set[Kept] = set()
        for item in made.accepted:
            written, name = results.get(item), (made.space, item.key)
            place = None if written is None else written.place
            if item.kind is ItemKind.BLOCK:
                block = self.model.blocks.get(name)
                if block is None or not is_accepted(block.place.segment_id) or (name, item.kind) in lost:
                    continue
                parent = block.parent
                if place is None or (parent is not None and self.model.is_accepted(parent)):
                    below = self.model.below(name)
                    lost |= {(each, ItemKind.BLOCK) for each in below}
                    lost |= {kept for kept in self.model.ssd if kept[0] in below}
                else:
                    moved[block.place] = place
                    block.place = place
                continue
            kept = (name, item.kind)
            if not self.model.state_is_accepted(kept) or kept in lost:
                continue
            if place is None or self.model.is_accepted(name):
                lost.add(kept)
            else:
                moved[self.model.ssd[kept][1]] = place
                self.model.ssd[kept] = (self.model.ssd[kept][0], place)
        gone: list[Gone] = []
        told: dict[Place, Place] = {}
        for step in self.rig.core.settling(number, made.session, results):
            told |= step.moved
            gone += step.gone
        assert told == moved
        assert {
            ((self.digests.index(each.namespace), each.item.key), each.item.kind) for each in gone
        } == lost
        self.gone(gone, by_force=True)

    @rule(number=consumes(reservations))
    def abort(self, number: int) -> None:
        made = self.model.reservations.get(number)
        if made is not None and made.is_writing:
            return
        self.model.reservations.pop(number, None)
        back = self.rig.core.abort(number, made.session if made else "a")
        assert [each.item for each in back] == ([item for item, *_ in made.items] if made else [])

    # ---- reading --------------------------------------------------------------------------------------------

    @rule(
        target=leases,
        session=SESSIONS,
        space=SPACES,
        path=PATHS,
        extra=st.integers(0, 40),
        exact_only=st.booleans(),
        lease=st.booleans(),
    )
    def lookup(
        self, *, session: str, space: int, path: tuple[int, ...], extra: int, exact_only: bool, lease: bool
    ) -> object:
        keys, now = self.keys(space, path), self.rig.clock.wall()
        result = self.rig.lookup(
            keys,
            len(keys) * B + extra,
            lease=lease,
            session=session,
            exact_only=exact_only,
            namespace=self.digests[space],
        )
        names = [(space, key) for key in keys]
        count = 0
        for name in names:
            block = self.model.blocks.get(name)
            if (
                block is None
                or math.ceil(block.used) + RETENTION <= now
                or (exact_only and block.lineage is Lineage.BOUNDED)
            ):
                break
            count += 1
        good = (Lineage.EXACT,) if exact_only else (Lineage.EXACT, Lineage.BOUNDED)
        assert result.coverage.blocks == count
        assert result.coverage.pool_states == tuple(
            (i + 1) * B for i in range(count) if self.model.pool.get(names[i]) in good
        )
        assert result.coverage.checkpoints == tuple(
            (i + 1) * B
            for i in range(count)
            if self.model.ssd.get((names[i], ItemKind.STATE), (None,))[0] in good
        )
        self.check_rows_and_branch(result.coverage, names, count, len(keys) * B + extra, good)
        used = result.plan.compute_from // B
        assert used <= count
        assert (result.lease_id is not None) == (lease and used > 0)
        if result.lease_id is None:
            return multiple()
        self.model.use(names[used - 1], now)
        plan = result.plan
        states: list[Kept] = []
        tier = Tier.POOL if plan.state_source is StateSource.POOL else Tier.SSD
        if plan.state_source in (StateSource.POOL, StateSource.CHECKPOINT):
            states = [(names[plan.state_at // B - 1], ItemKind.STATE)]
        elif plan.state_source is StateSource.ROWS:
            edge, overlap = rows_edge(TINY, plan.state_at)
            needed = rows_needed(TINY, edge, overlap=overlap)
            assert plan.state_at == needed.state_at
            read = names[needed.first_block : needed.first_block + needed.blocks]
            states = [(name, ItemKind.ROWS) for name in read]
        self.model.leases[result.lease_id] = LeaseModel(
            session,
            space,
            keys[:used],
            self.rig.clock.monotonic() + 60,
            used,
            states,
            tier if states else None,
        )
        return result.lease_id

    def check_rows_and_branch(
        self,
        coverage: Coverage,
        names: list[Name],
        count: int,
        prompt_tokens: int,
        good: tuple[Lineage, ...],
    ) -> None:
        longest = min(count, (prompt_tokens - 1) // B)
        for overlap, found in ((False, coverage.rows), (True, coverage.rows_overlap)):
            length = TINY.rows_overlap_block_bytes if overlap else TINY.rows_block_bytes
            edges = []
            for edge in range(1, longest + 1):
                needed = rows_needed(TINY, edge * B, overlap=overlap)
                read = names[needed.first_block : needed.first_block + needed.blocks]
                held = [self.model.ssd.get((name, ItemKind.ROWS)) for name in read]
                if all(each and each[0] in good and each[1].length == length for each in held):
                    edges.append(edge * B)
            assert found == tuple(edges[-1:]), "the deepest edge that all rows are held for"
        branch_at = 0
        if 0 < count < len(names):
            parents = {block.parent for name, block in self.model.blocks.items() if name != names[count]}
            branch_at = count * B if names[count - 1] in parents else 0
        assert coverage.branch_at == branch_at

    @rule(number=consumes(leases), session=SESSIONS)
    def release(self, number: int, session: str) -> None:
        lease = self.model.leases.get(number)
        mine = lease is not None and lease.session == session
        assert self.rig.core.release(number, session, self.rig.clock.monotonic()) == mine
        if mine:
            del self.model.leases[number]

    @rule(session=SESSIONS)
    def end_session(self, session: str) -> None:
        ended = self.rig.core.end_session(session, self.rig.clock.monotonic())
        leases = [number for number, lease in self.model.leases.items() if lease.session == session]
        made = [
            number
            for number, each in self.model.reservations.items()
            if each.session == session and not each.is_writing
        ]
        assert (ended.leases, ended.reservations) == (len(leases), len(made))
        for number in leases:
            del self.model.leases[number]
        for number in made:
            del self.model.reservations[number]

    # ---- leaving --------------------------------------------------------------------------------------------

    @rule(blocks=st.integers(1, 6), prefer_states=st.booleans())
    def evict(self, blocks: int, prefer_states: bool) -> None:
        need = blocks * TINY.block_bytes
        left = self.rig.core.plan_eviction(need, prefer_states=prefer_states, now_wall=self.rig.clock.wall())
        self.gone(left)
        if sum(each.place.length for each in left) < need:
            # Then nothing is left that could go.
            parents = {block.parent for block in self.model.blocks.values()}
            for name in self.model.blocks:
                assert (
                    name in parents
                    or self.model.is_leased(name)
                    or self.model.is_built_on(name)
                    or self.model.is_accepted(name)
                )

    @rule(seconds=st.sampled_from([0.3, 0.3, 5.0, 5.0, 61.0, 3600.0, RETENTION / 2, RETENTION]))
    def time_passes(self, seconds: float) -> None:
        self.rig.clock.advance(seconds)
        now = self.rig.clock.monotonic()
        due = [number for number, lease in self.model.leases.items() if lease.deadline <= now]
        assert self.rig.core.expire_leases(now) == len(due)
        for number in due:
            del self.model.leases[number]
        late = [
            number
            for number, made in self.model.reservations.items()
            if made.deadline <= now and not made.is_writing
        ]
        back = self.rig.core.expire_reservations(now)
        assert len(back) == sum(len(self.model.reservations[number].items) for number in late)
        for number in late:
            del self.model.reservations[number]

    @rule(limit=st.integers(1, 20))
    def expire_blocks(self, limit: int) -> None:
        now = self.rig.clock.wall()
        left = self.rig.core.expire_blocks(now, limit=limit)
        for each in left:
            name = (self.digests.index(each.namespace), each.item.key)
            # Last uses are kept by the second, rounded up.
            assert self.model.blocks[name].used + RETENTION <= now
        self.gone(left)

    @rule(space=SPACES, path=PATHS, kind=st.sampled_from(ItemKind))
    def forget(self, space: int, path: tuple[int, ...], kind: ItemKind) -> None:
        key = self.keys(space, path)[-1]
        name = (space, key)
        held = {name} if (name, kind) in self.model.ssd else set()
        expected = self.model.below(name) if kind is ItemKind.BLOCK else held
        left = self.rig.core.forget(self.digests[space], ItemId(key, kind))
        assert {(space, each.item.key) for each in left if each.item.kind is kind} == expected
        self.gone(left, by_force=True)

    @rule(space=st.sampled_from([None, None, None, 0, 1]))
    def clear(self, space: int | None) -> None:
        if space is None:
            return
        cleared, _ = self.rig.core.clear(self.digests[space])
        for number, made in list(self.model.reservations.items()):
            if made.space == space and made.is_writing:
                made.is_void = True
            elif made.space == space:
                del self.model.reservations[number]
        self.gone(list(cleared.gone), by_force=True)
        on_ssd = [name for name, _ in self.model.ssd]
        assert not [name for name in (*self.model.blocks, *on_ssd, *self.model.pool) if name[0] == space]

    @rule(tier=st.sampled_from([None, Tier.POOL, Tier.SSD]))
    def drop_states(self, tier: Tier | None) -> None:
        report = self.rig.core.drop_states(None, tier)
        self.gone(list(report.gone))
        if tier in (None, Tier.POOL):
            for name in list(self.model.pool):
                if not self.model.state_is_leased((name, ItemKind.STATE), Tier.POOL):
                    self.model.lose_state((name, ItemKind.STATE), Tier.POOL)
        kept = (len(self.model.pool) if tier is not Tier.SSD else 0) + (
            len(self.model.ssd) if tier is not Tier.POOL else 0
        )
        assert report.kept == kept

    @rule(share=st.integers(0, 3))
    def hold_states_to_their_share(self, share: int) -> None:
        limit = share * TINY.state_bytes
        self.gone(self.rig.core.states_over_share(limit))
        unleased = [
            kept
            for kept in self.model.ssd
            if not (self.model.state_is_leased(kept, Tier.SSD) or self.model.state_is_accepted(kept))
        ]
        assert sum(place.length for _, place in self.model.ssd.values()) <= limit or not unleased

    @rule(choice=st.integers(0, 100), lose=st.booleans())
    def clean_a_segment(self, choice: int, lose: bool) -> None:
        segments = sorted(each for each in self.rig.core.items_in_segments() if not is_accepted(each))
        if not segments:
            return
        segment = segments[choice % len(segments)]
        old = [b.place for b in self.model.blocks.values() if b.place.segment_id == segment]
        old += [place for _, place in self.model.ssd.values() if place.segment_id == segment]
        assert self.rig.core.items_in_segments()[segment] == len(old)
        moved = {place: self.rig.place(place.length) for place in old[int(lose) :]}
        for block in self.model.blocks.values():
            block.place = moved.get(block.place, block.place)
        self.model.ssd = {
            kept: (lineage, moved.get(place, place)) for kept, (lineage, place) in self.model.ssd.items()
        }
        report = self.rig.core.relocate(segment, moved)
        assert (report.moved, list(report.discard)) == (len(moved), [])
        if lose:
            assert old[0] in [each.place for each in report.lost]
        self.gone(list(report.lost), by_force=True)

    # ---- laws -----------------------------------------------------------------------------------------------

    @invariant()
    def the_laws_hold(self) -> None:
        self.rig.core.check_integrity()
        stats, model = self.rig.core.statistics(), self.model
        waiting = [name for name in model.blocks if model.is_accepted(name)]
        waiting_states = [kept for kept in model.ssd if model.state_is_accepted(kept)]
        rows = [
            place.length
            for kept, (_, place) in model.ssd.items()
            if kept[1] is ItemKind.ROWS and kept not in waiting_states
        ]
        assert (stats.blocks, stats.ssd_states, stats.pool.states) == (
            len(model.blocks) - len(waiting),
            len(model.ssd) - len(waiting_states),
            len(model.pool),
        )
        assert (stats.accepted_blocks, stats.accepted_states) == (len(waiting), len(waiting_states))
        assert stats.accepted_bytes == sum(model.blocks[name].place.length for name in waiting) + sum(
            model.ssd[kept][1].length for kept in waiting_states
        )
        assert (stats.rows, stats.rows_bytes) == (len(rows), sum(rows))
        assert (stats.leases, stats.reservations) == (len(model.leases), len(model.reservations))
        assert stats.in_flight == sum(len(made.items) for made in model.reservations.values())
        assert stats.pool.pinned == len(
            {
                kept
                for lease in model.leases.values()
                if lease.tier is Tier.POOL
                for kept in lease.states
                if kept not in lease.lost
            }
        )

    @invariant()
    def leases_hand_over_what_they_promised_or_nothing(self) -> None:
        for number, lease in self.model.leases.items():
            found = self.rig.core.fetch_list(
                self.rig.core.lease(number, lease.session, self.rig.clock.monotonic()),
                first_block=0,
                block_count=len(lease.keys),
                want_state=bool(lease.states),
            )
            blocks = found[: len(lease.keys)]
            assert [item is not None for item in blocks] == [i < lease.intact for i in range(len(lease.keys))]
            for key, item in zip(lease.keys, blocks, strict=True):
                if item is not None:
                    self.check_item(
                        item, ItemId(key, ItemKind.BLOCK), self.model.blocks[lease.space, key].place
                    )
            for kept, item in zip(lease.states, found[len(lease.keys) :], strict=True):
                assert (item is not None) == (kept not in lease.lost)
                if item is not None:
                    place = self.model.ssd[kept][1] if lease.tier is Tier.SSD else None
                    self.check_item(item, ItemId(kept[0][1], kept[1]), place)

    def check_item(self, item: FetchItem, wanted: ItemId, place: Place | None) -> None:
        assert (item.item, item.place, item.checks) == (wanted, place, checks_of(wanted.key))
        assert (item.payload is not None) == (place is None)


TestCoreMachine = CoreMachine.TestCase
TestCoreMachine.settings = settings(
    max_examples=examples(80),
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
