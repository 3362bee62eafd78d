"""The log of a block device, and what may be on the device after a power cut: pure functions.

The log is a row of entries: one byte W (write) or F (flush), 8 offset, 4 length (little-endian), then the bytes. A
flush makes durable what was written before it; of later writes a power cut keeps any sectors of 512 bytes.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

SECTOR = 512
SUPERBLOCK_END = 4096
"""Writes that begin before it are never torn: the superblock of an ext4 is two sectors under one checksum, without a
copy in a small image."""
_HEAD = struct.Struct("<cQI")
_SHARES = (0.1, 0.5, 0.9)


class Op(NamedTuple):
    """One entry; `end` is the log's length up to and with it."""

    flush: bool
    offset: int
    data: memoryview
    end: int


class Loss(StrEnum):
    """What is left of the writes between the last flush and the cut.

    TORN: any sectors. WHOLE: any writes, each whole. ONE: one write only. NONE: nothing. ALL: everything, in order.
    """

    TORN = "torn"
    WHOLE = "whole"
    ONE = "one"
    NONE = "none"
    ALL = "all"


def parse_log(data: bytes) -> list[Op]:
    """Every whole entry. One that is cut off at the end was never finished."""
    view = memoryview(data)
    ops = []
    at = 0
    while at + _HEAD.size <= len(data):
        kind, offset, length = _HEAD.unpack_from(data, at)
        begin, at = at + _HEAD.size, at + _HEAD.size + length
        if at > len(data):
            break
        ops.append(Op(kind == b"F", offset, view[begin:at], at))
    return ops


def encode_op(offset: int | None, data: bytes = b"") -> bytes:
    """An entry as the device logs it; offset None for a flush."""
    return _HEAD.pack(b"F" if offset is None else b"W", offset or 0, len(data)) + data


def flushes(ops: Sequence[Op]) -> list[int]:
    """The indexes of all flushes."""
    return [index for index, op in enumerate(ops) if op.flush]


class Disk:
    """The contents of a device along its log. Cuts are asked for in any order; going on from the last one is cheap."""

    def __init__(self, first: bytes, ops: Sequence[Op]) -> None:
        self._first = first
        self._ops = ops
        self._durable = bytearray(first)
        self._flushed = 0
        """Entries before this index are in `_durable`."""

    def after_cut(self, cut: int, loss: Loss, rng: random.Random) -> bytearray:
        """The contents after a power cut behind the entry of index `cut`."""
        last = next((i for i in range(cut, -1, -1) if self._ops[i].flush), -1)
        if last + 1 < self._flushed:
            self._durable = bytearray(self._first)
            self._flushed = 0
        for op in self._ops[self._flushed : last + 1]:
            self._durable[op.offset : op.offset + len(op.data)] = op.data
        self._flushed = last + 1
        image = bytearray(self._durable)
        for offset, data in survivors(
            [op for op in self._ops[last + 1 : cut + 1] if not op.flush], loss, rng
        ):
            image[offset : offset + len(data)] = data
        return image


def survivors(writes: Sequence[Op], loss: Loss, rng: random.Random) -> list[tuple[int, memoryview]]:
    """What reaches the device of writes that no flush covers, in the order in which it overwrites."""
    match loss:
        case Loss.NONE:
            return []
        case Loss.ALL:
            return [(op.offset, op.data) for op in writes]
        case Loss.ONE:
            return [(op.offset, op.data) for op in ([rng.choice(writes)] if writes else [])]
        case Loss.WHOLE:
            return [(op.offset, op.data) for op in writes if rng.random() < 0.5]
        case Loss.TORN:
            share = rng.choice(_SHARES)
            return [
                (op.offset + at, op.data[at : at + size])
                for op in writes
                for size in [SECTOR if op.offset >= SUPERBLOCK_END else len(op.data)]
                for at in range(0, len(op.data), size or 1)
                if rng.random() < share
            ]
