"""A segment's footer as columns: a million entries are an array, and not a million objects."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.store.format import (
    FOOTER_ENTRY_BYTES,
    FOOTER_HEADER_BYTES,
    KINDS,
    RECORD_HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    Entry,
    SegmentIdentity,
    Verdict,
    decode_footer,
    encode_footer,
    footer_head,
)
from kvstore.types import NamespaceDigest

ENTRY = np.dtype(
    [
        ("key", "<u8", (4,)),
        ("parent", "<u8", (4,)),
        ("sequence", "<u8"),
        ("xxh3_64", "<u8"),
        ("created_ms", "<u8"),
        ("position", "<u8"),
        ("crc32", "<u4"),
        ("offset", "<u4"),
        ("length", "<u4"),
        ("namespace", "<u2"),
        ("kind", "u1"),
        ("flags", "u1"),
    ]
)
"""A footer's entry as the format page describes it, field by field as `Entry`."""
assert ENTRY.itemsize == FOOTER_ENTRY_BYTES
assert ENTRY.names == Entry._fields

FLAG_XXH3, FLAG_BOUNDED = 1, 2

_KNOWN_KIND = np.zeros(256, dtype=bool)
_KNOWN_KIND[list(KINDS)] = True


class Footer(NamedTuple):
    """What a segment holds, in the order in which it was written. `entries` has dtype ENTRY; `data` is what both were
    read from, without padding: what the catalogue keeps a copy of."""

    namespaces: list[NamespaceDigest]
    entries: NDArray[np.void]
    records_end: int
    data: bytes


EMPTY = Footer([], np.zeros(0, ENTRY), SEGMENT_HEADER_BYTES, b"")


def read_footer(data: bytes, *, identity: SegmentIdentity) -> Footer | Verdict:
    """As `decode_footer`. CORRUPT as well when an entry is not what a writer of ours leaves: offsets ascend, records do
    not overlap, lie between the segment's header and `records_end`, and are of known kinds and namespaces."""
    head = footer_head(data, identity=identity)
    if isinstance(head, Verdict):
        return head
    body = FOOTER_HEADER_BYTES + 32 * head.namespaces
    namespaces = [NamespaceDigest(data[at : at + 32]) for at in range(FOOTER_HEADER_BYTES, body, 32)]
    entries = np.frombuffer(data, ENTRY, count=head.entries, offset=body)
    footer = Footer(namespaces, entries, head.records_end, data[: body + entries.nbytes])
    return footer if _is_sound(footer) else Verdict.CORRUPT


def without_entries_behind(footer: Footer, end: int, *, identity: SegmentIdentity) -> Footer:
    """The footer of what is left of a file of `end` bytes."""
    whole = decode_footer(footer.data, identity=identity)
    assert not isinstance(whole, Verdict), "it was read before"
    data = encode_footer(
        identity,
        offset=end,
        records_end=end,
        namespaces=whole.namespaces,
        entries=[entry for entry in whole.entries if entry.offset + entry.length <= end],
    )
    left = read_footer(data, identity=identity)
    assert not isinstance(left, Verdict), "it was encoded here"
    return left


def _is_sound(footer: Footer) -> bool:
    entries = footer.entries
    if not len(entries):
        return True
    begins = entries["offset"].astype(np.int64)
    ends = begins + entries["length"]
    return bool(
        begins[0] >= SEGMENT_HEADER_BYTES + RECORD_HEADER_BYTES
        and ends[-1] <= footer.records_end
        and np.all(begins[1:] - RECORD_HEADER_BYTES >= ends[:-1])
        and np.all(entries["namespace"] < len(footer.namespaces))
        and np.all(_KNOWN_KIND[entries["kind"]])
    )
