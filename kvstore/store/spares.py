"""Files between two lives: a segment that went leaves its file, allocated and written, to the next one.

Writing over blocks that were written before is steadier than first writes into fresh ones, and asks nothing of a file
system that others have filled.
"""

from __future__ import annotations

from contextlib import suppress

from kvstore.errors import DeviceError, NoSpace
from kvstore.store.device import read_fully
from kvstore.store.erasing import blank_forgotten, blank_given_up
from kvstore.store.format import SEGMENT_HEADER_BYTES, begins_segment_of
from kvstore.store.segment import Segment, is_spare_name, spare_name
from kvstore.store.space import SPARES_MAX
from kvstore.store.state import OpenedStore


def adopt_spares(store: OpenedStore) -> None:
    """At a start: take over the spares that earlier runs left, as far as they have the size of new segments. A file that
    does not begin as a segment of this store is another's, whatever its name: it is left alone, and counts as other bytes."""
    for name in store.device.names():
        if not is_spare_name(name):
            continue
        size = _size_if_ours(store, name)
        if size is None:
            store.disk.left_alone.add(name)
            continue
        blank_forgotten(store, name)
        # One with holes, as a copied directory may have, would want room when it is written.
        is_whole = size == store.disk.segment_bytes and store.device.allocated(name) >= size
        if is_whole and len(store.disk.spares) < SPARES_MAX:
            store.disk.spares[name] = size
        else:
            store.device.unlink(name)
    store.disk.refresh()
    drop_spares_over_budget(store)


def retire_file(store: OpenedStore, segment: Segment, *, kept: int) -> str | None:
    """Let go of the file of a segment that has gone: for good, or under the name of a spare, which is returned, and
    overwritten before that while something is erased. Only
    when the names are synced the caller may put it among the spares. `kept`: how many there are, or will be then. Raises
    DeviceError or NoSpace."""
    disk = store.disk
    blank_given_up(store, segment.name, begin=segment.blanked)
    if is_spare_name(segment.name):
        # Renamed before, when the names could not be synced.
        return segment.name
    if segment.allocated != disk.segment_bytes or kept >= SPARES_MAX or disk.unused_bytes() < 0:
        store.device.unlink(segment.name)
        return None
    name = spare_name(segment.segment_id)
    if name in disk.spares or name in disk.left_alone:
        store.device.unlink(segment.name)
        return None
    store.device.rename(segment.name, name)
    segment.name = name
    store.table.count("recycled_segments")
    return name


def drop_spares_over_budget(store: OpenedStore) -> None:
    """What is kept for later goes first when the rest has grown. A removal that fails is tried again the next time."""
    disk = store.disk
    while disk.spares and disk.unused_bytes() < 0:
        drop_spare(store)


def drop_spare(store: OpenedStore) -> bool:
    """Give one spare back to the file system; False when there is none, or its removal failed."""
    disk = store.disk
    if not disk.spares:
        return False
    name, size = disk.spares.popitem()
    try:
        store.device.unlink(name)
        store.device.sync_names()
    except (DeviceError, NoSpace):
        store.table.count("device_errors")
        disk.spares[name] = size
        return False
    return True


def _size_if_ours(store: OpenedStore, name: str) -> int | None:
    """The bytes of a spare of this store; None where that cannot be told."""
    with suppress(DeviceError):
        file = store.device.open(name)
        if file is None:
            return None
        try:
            for _ in range(2):
                if begins_segment_of(read_fully(file, 0, SEGMENT_HEADER_BYTES), store.uuid):
                    return file.size()
                # It may have been bent on its way.
                file.forget_cached(0, SEGMENT_HEADER_BYTES)
        finally:
            file.close()
    return None
