"""What writers have sent for their reservations: from the first byte to the commit, or to the end of the reservation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvstore.core.accepted import accepted_place
from kvstore.core.base import Granted, Written
from kvstore.core.steps import ITEMS_AT_ONCE, Steps
from kvstore.errors import InvalidArgument, UnknownReservation
from kvstore.memory import BlockCache
from kvstore.memory import Slot as Shown
from kvstore.profile.base import Profile
from kvstore.profile.layout import slice_ends
from kvstore.service.frames import Incoming
from kvstore.service.staging import Staging
from kvstore.service.tenancy import Tenancy
from kvstore.store.base import Place, Record, RecordKind
from kvstore.store.buffers import Slot, SlotPool
from kvstore.store.format import LARGE_PAYLOAD_BYTES, record_span
from kvstore.types import BlockKey, Checks, ItemId, ItemKind, NamespaceDigest


@dataclass(eq=False, slots=True)
class Upload:
    """The bytes of one reservation. `deadline` is monotonic seconds; `closed`: nothing is taken in any more, since it
    is being committed or has ended. `shown_in`: the domain in whose memory its large items are put together, since they are
    going to be shown there before they are durable; None where nothing says so."""

    reservation_id: int
    session: str
    namespace: NamespaceDigest
    profile: Profile
    granted: dict[int, Granted]
    deadline: float
    tenant: str = ""
    shown_in: str | None = None
    arrived: dict[int, Incoming] = field(default_factory=dict)
    staged_bytes: int = 0
    closed: bool = False
    _slices: dict[tuple[ItemKind, int], Sequence[int]] = field(default_factory=dict)

    def records(self, indexes: Iterable[int]) -> list[tuple[Granted, Record]]:
        """What of these items goes to the log, in their order."""
        found = []
        for index in indexes:
            granted = self.granted[index]
            if index in self.arrived and granted.item.to_ssd:
                incoming = self.arrived[index]
                item = granted.item
                is_block = item.kind is ItemKind.BLOCK
                found.append(
                    (
                        granted,
                        Record(
                            RecordKind(item.kind),
                            self.namespace,
                            item.key,
                            BlockKey(item.parent) if is_block else item.key,
                            item.position,
                            item.lineage,
                            incoming.payload(),
                            incoming.checks,
                            self.slices(index),
                            incoming.slot,
                            incoming.sums,
                        ),
                    )
                )
        return found

    def slices(self, index: int) -> Sequence[int]:
        """Where the payload of a granted item may be cut."""
        item = self.granted[index].item
        shape = item.kind, item.length
        if shape not in self._slices:
            # Hundreds of items have one shape, and a profile is slow to be looked up by.
            self._slices[shape] = slice_ends(self.profile, item.kind, item.length)
        return self._slices[shape]

    def results(self, places: dict[int, Place], indexes: Iterable[int]) -> dict[ItemId, Written]:
        """What became of these items, which have arrived: those for SSD whose place is missing were not written."""
        results = {}
        for index in indexes:
            incoming = self.arrived[index]
            item = self.granted[index].item
            if not item.to_ssd or index in places:
                payload = incoming.payload() if item.to_pool else None
                results[item.item_id] = Written(incoming.checks, places.get(index), payload)
        return results


class Uploads:
    """All uploads, by reservation. Their bytes count as staging's, and go back whichever way they end. `memory`: where those lie
    that are to be shown before they are durable, as far as it has room for them; None where there is none."""

    def __init__(self, staging: Staging, tenants: Tenancy, memory: BlockCache | None = None) -> None:
        self._staging = staging
        self._tenants = tenants
        self._memory = memory
        self._slots = SlotPool(staging.limit_bytes)
        self._open: dict[int, Upload] = {}

    def __len__(self) -> int:
        return len(self._open)

    def begin(
        self,
        reservation_id: int,
        *,
        session: str,
        namespace: NamespaceDigest,
        profile: Profile,
        granted: Sequence[Granted],
        deadline: float,
        tenant: str = "",
        shown_in: str | None = None,
    ) -> None:
        named = {each.index: each for each in granted}
        self._open[reservation_id] = Upload(
            reservation_id, session, namespace, profile, named, deadline, tenant, shown_in
        )

    def get(self, reservation_id: int, session: str) -> Upload:
        upload = self._open.get(reservation_id)
        if upload is None or upload.session != session or upload.closed:
            raise UnknownReservation(
                "no such open reservation: never made here, of another session, committed, aborted, or past its deadline",
                field="reservation_id",
                value=reservation_id,
                allowed="an open reservation of this session",
            )
        return upload

    def start(self, upload: Upload, index: int, length: int, checks: Checks) -> Incoming:
        """Room for one item's bytes, which is the caller's until `finish`, or to be dropped. InvalidArgument for an item that is
        not to be written like this; LimitExceeded; UnknownReservation once the upload has ended."""
        self._check_open(upload)
        granted = upload.granted.get(index)
        if granted is None:
            raise InvalidArgument(
                "the item was not granted",
                field="items.item",
                value=index,
                allowed="places of GRANTED items in the Reserve call",
            )
        if length != granted.item.length:
            raise InvalidArgument(
                f"item {index} was reserved with another length",
                field="items.length",
                value=length,
                allowed=f"{granted.item.length}",
            )
        self._check_unwritten(upload, index)
        self._take(upload, length)
        # Large records are put together as they will lie on the disk; what the pool keeps has memory of its own.
        item = granted.item
        is_for_slot = item.to_ssd and not item.to_pool and length >= LARGE_PAYLOAD_BYTES
        try:
            shown = self._begun(upload, index, length) if is_for_slot else None
            if shown is not None:
                return Incoming(f"item {index}", length, checks, Slot(length, shown.pages), shown=shown)
            slot = self._slots.take(length) if is_for_slot else None
            return Incoming(f"item {index}", length, checks, slot)
        except BaseException:
            self._give_back(upload, length)
            raise

    def _begun(self, upload: Upload, index: int, length: int) -> Shown | None:
        """Where a large item is to be found before it is durable. It has the shape of its record, as what was read has, so
        that it is written to the disk from there too."""
        if self._memory is None or upload.shown_in is None:
            return None
        place = accepted_place(upload.reservation_id, index, length)
        return self._memory.begin(upload.shown_in, place, room_bytes=record_span(length), for_writer=True)

    def finish(self, upload: Upload, arrived: Mapping[int, Incoming]) -> None:
        """All items of a Write call have arrived and have their checksums. Raises as `start` where another call was
        faster, and takes none then."""
        self._check_open(upload)
        for index in arrived:
            self._check_unwritten(upload, index)
        for incoming in arrived.values():
            incoming.check()
        upload.arrived.update(arrived)
        upload.staged_bytes += sum(incoming.length for incoming in arrived.values())

    def drop(self, upload: Upload, left: Iterable[Incoming]) -> None:
        """Items of a Write call that failed. Not before nobody writes to them any more, though the upload may have ended long
        ago."""
        for incoming in left:
            self._give_back(upload, incoming.length)
            self._abandon(incoming)

    def _give_back(self, upload: Upload, length: int) -> None:
        self._staging.give_back(length, upload.session)
        self._tenants.give_back(upload.tenant, length)

    def close(self, upload: Upload) -> None:
        """Take nothing more in: it is being committed."""
        self._check_open(upload)
        upload.closed = True

    def ending(self, reservation_id: int) -> Steps[None, None]:
        """It takes nothing in from the first step on; its memory goes back by and by. Ending twice does nothing."""
        yield from self._ending([self._open[reservation_id]] if reservation_id in self._open else [])

    def ending_where(self, over: Callable[[Upload], bool]) -> Steps[None, None]:
        """The same of those that are not being committed and for which `over` holds now."""
        yield from self._ending([each for each in self._open.values() if not each.closed and over(each)])

    def _ending(self, uploads: Sequence[Upload]) -> Steps[None, None]:
        for upload in uploads:
            upload.closed = True
            del self._open[upload.reservation_id]
        done = 0
        try:
            for upload in uploads:
                while upload.arrived:
                    self._let_go(upload)
                    done += 1
                    if done % ITEMS_AT_ONCE == 0:
                        yield
        finally:
            for upload in uploads:
                while upload.arrived:
                    self._let_go(upload)

    def _take(self, upload: Upload, length: int) -> None:
        self._tenants.take(upload.tenant, length)
        try:
            self._staging.take(length, upload.session)
        except BaseException:
            self._tenants.give_back(upload.tenant, length)
            raise

    def _let_go(self, upload: Upload) -> None:
        """Of one item."""
        _, incoming = upload.arrived.popitem()
        upload.staged_bytes -= incoming.length
        self._give_back(upload, incoming.length)
        if incoming.slot is not None and not incoming.is_mapped:
            self._slots.give_back(incoming.slot)
        self._abandon(incoming)

    def _abandon(self, incoming: Incoming) -> None:
        """Where it lies in memory that was begun for it, and nobody has shown it."""
        if incoming.shown is not None and self._memory is not None:
            self._memory.abandon(incoming.shown)
            incoming.shown = None

    def _check_unwritten(self, upload: Upload, index: int) -> None:
        if index in upload.arrived:
            raise InvalidArgument(
                "the item has been written already", field="items.item", value=index, allowed="each item once"
            )

    def _check_open(self, upload: Upload) -> None:
        if upload.closed:
            raise UnknownReservation(
                "the reservation ended, or its commit began, while its bytes were coming in",
                field="reservation_id",
                value=upload.reservation_id,
                allowed="writing before Commit, Abort and the deadline",
            )
