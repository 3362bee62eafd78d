"""The disk format to the byte: what an earlier build wrote is read, and is what this one writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvstore.store import catalog
from kvstore.store import format as disk
from kvstore.types import Checks, Lineage
from tests.golden import structures as given

KNOWN: dict[str, list[str]] = json.loads(
    (Path(__file__).parent / f"format-{disk.FORMAT_VERSION}.json").read_text("ascii")
)


def golden(name: str) -> bytes:
    return given.parse(KNOWN[name])


def test_the_golden_file_has_every_structure() -> None:
    assert list(KNOWN) == list(given.structures())


@pytest.mark.parametrize("name", KNOWN)
def test_a_structure_is_written_as_it_was_to_the_byte(name: str) -> None:
    assert given.structures()[name] == golden(name)


def test_the_identity_and_the_segment_header_are_read() -> None:
    assert disk.decode_identity(golden("identity file"), directory="here") == given.UUID
    begin, end = golden("segment header, bytes 0-71"), golden("segment header, bytes 4092-4095")
    page = begin.ljust(disk.SEGMENT_HEADER_BYTES - len(end), b"\0") + end
    assert disk.decode_segment_header(page) == given.HEADER


@pytest.mark.parametrize(
    ("name", "payload", "offset", "kind"),
    [
        ("head of a small record", given.SMALL, 4096, 1),
        ("head of a large record, 5 slices", given.LARGE, 8192, 2),
    ],
)
def test_a_record_is_read(name: str, payload: bytes, offset: int, kind: int) -> None:
    decoded = disk.decode_record(golden(name) + payload, identity=given.HOME, offset=offset)
    assert not isinstance(decoded, disk.Verdict)
    header, read = decoded
    assert read == payload
    assert (header.kind, header.namespace, header.key, header.parent) == (
        kind,
        given.NAMESPACE,
        given.KEY,
        given.PARENT,
    )
    assert (header.sequence, header.position, header.created_ms, header.batch, header.lineage) == (
        42,
        128,
        1_800_000_000_001,
        4096,
        Lineage.BOUNDED,
    )
    assert header.checks == Checks(0x12345678, 0xABCDEF, True)


def test_the_table_of_slices_is_read() -> None:
    data = golden("head of a large record, 5 slices") + given.LARGE
    header = disk.decode_record_header(data, identity=given.HOME, offset=8192)
    assert isinstance(header, disk.RecordHeader)
    slices = disk.decode_slices(data, header)
    assert not isinstance(slices, disk.Verdict)
    assert [each.end for each in slices] == given.ends()
    assert disk.slices_hold(slices, 10_000, given.LARGE[10_000:34_096])


def test_the_footer_and_its_trailer_are_read() -> None:
    footer = disk.decode_footer(golden("footer"), identity=given.HOME)
    assert footer == disk.Footer(given.NAMES, given.ENTRIES, 86_464)
    assert disk.decode_trailer(golden("trailer")) == (given.FOOTER_OFFSET, given.HOME.salt)


def test_the_catalogue_s_rows_are_read() -> None:
    sealed = catalog.SegmentRow(given.HOME.salt, 1 << 20, catalog.SEALED)
    assert catalog.decode_segment_row(golden("catalogue row S")) == sealed
    uses = catalog.decode_uses_row(golden("catalogue row U"), salt=given.HOME.salt)
    assert [tuple(row) for row in uses.tolist()] == given.USES
    assert catalog.decode_policy_row(golden("catalogue row P")) == (44, given.POLICY)
    key = catalog.description_key(given.DESCRIBED)
    assert catalog.decode_description_row(key, golden("catalogue row N")) == given.DESCRIBED
    held = catalog.open_value(b"P" + given.NAMESPACE, golden("a row as LMDB holds it"))
    assert held == golden("catalogue row P")
