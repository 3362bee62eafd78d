"""One of each structure of the disk format, with its fields spelled out. `test_format.py` holds them against the bytes
in `format-2.json`; a format that gives other bytes is another version, in a file of its own.

`python -m tests.golden.structures` prints the file anew, for a new version.
"""

from __future__ import annotations

import json
from itertools import pairwise

from kvstore.store import catalog
from kvstore.store import format as disk
from kvstore.types import BlockKey, Checks, Lineage, NamespaceDigest

UUID = bytes(range(16))
HOME = disk.SegmentIdentity(disk.store_tag(UUID), 7, 0x1122334455667788)
NAMESPACE, KEY, PARENT = NamespaceDigest(b"n" * 32), BlockKey(b"k" * 32), BlockKey(b"p" * 32)
SMALL = bytes(range(100))
LARGE = bytes(range(256)) * 300
CUTS = (10_000, 30_000, 34_096, 76_799)
HEADER = disk.SegmentHeader(UUID, 7, HOME.salt, 1_800_000_000_000, 1 << 20, 41)
ENTRIES = [
    disk.Entry(KEY, PARENT, 42, 0xABCDEF, 1_800_000_000_001, 128, 0x12345678, 4352, len(SMALL), 0, 1, 1),
    disk.Entry(PARENT, KEY, 43, 0, 1_800_000_000_002, 256, 0x9ABCDEF0, 8928, len(LARGE), 1, 2, 2),
]
NAMES = [NAMESPACE, NamespaceDigest(b"m" * 32)]
FOOTER_OFFSET = 90_112
USES = [(4352, 500_000), (8928, 500_001)]
POLICY = "periodic:2048"
DESCRIBED = catalog.Description(
    NAMESPACE, KEY, 45, PARENT, 128, Lineage.BOUNDED, Checks(0x12345678, 0xABCDEF, True), b"description", None
)


def head(payload: bytes, *, offset: int, kind: int, cuts: tuple[int, ...] = ()) -> bytes:
    return disk.encode_record_head(
        identity=HOME,
        offset=offset,
        batch=4096,
        sequence=42,
        created_ms=1_800_000_000_001,
        kind=kind,
        namespace=NAMESPACE,
        key=KEY,
        parent=PARENT,
        position=128,
        lineage=Lineage.BOUNDED,
        checks=Checks(0x12345678, 0xABCDEF, True),
        sums=disk.payload_sums(payload, cuts),
    )


def footer() -> bytes:
    return disk.encode_footer(
        HOME, offset=FOOTER_OFFSET, records_end=86_464, namespaces=NAMES, entries=ENTRIES
    )


def structures() -> dict[str, bytes]:
    """The bytes of each structure, without the zeros that pad it."""
    finished = disk.finish_footer(footer(), offset=FOOTER_OFFSET, salt=HOME.salt)
    page = disk.encode_segment_header(HEADER)
    return {
        "identity file": disk.encode_identity(UUID),
        "segment header, bytes 0-71": page[:72],
        "segment header, bytes 4092-4095": page[-4:],
        "head of a small record": head(SMALL, offset=4096, kind=1),
        "head of a large record, 5 slices": head(LARGE, offset=8192, kind=2, cuts=CUTS),
        "footer": footer(),
        "trailer": finished[-disk.TRAILER_BYTES :],
        "catalogue row I": catalog.identity_row(UUID),
        "catalogue row S": catalog.segment_row(catalog.SegmentRow(HOME.salt, 1 << 20, catalog.SEALED)),
        "catalogue row U": catalog.uses_row(HOME.salt, USES),
        "catalogue row P": catalog.policy_row(44, POLICY),
        "catalogue row N": catalog.description_row(DESCRIBED),
        "a row as LMDB holds it": catalog.seal_value(b"P" + NAMESPACE, catalog.policy_row(44, POLICY)),
    }


def lines(data: bytes) -> list[str]:
    """Hexadecimal, 32 bytes a line; a run of zeros to the end is left out and counted."""
    body = data.rstrip(b"\0")
    text = [body[at : at + 32].hex() for at in range(0, len(body), 32)]
    return [*text, f"zeros {len(data) - len(body)}"]


def parse(text: list[str]) -> bytes:
    return bytes.fromhex("".join(text[:-1])) + bytes(int(text[-1].removeprefix("zeros ")))


def ends() -> list[int]:
    return [end for _, end in pairwise((0, *CUTS, len(LARGE)))]


if __name__ == "__main__":
    print(json.dumps({name: lines(data) for name, data in structures().items()}, indent=1))
