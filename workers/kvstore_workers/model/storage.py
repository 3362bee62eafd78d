"""Growing and sliding row storage of one layer. Rows are kept as bytes and as numbers; the numbers follow the bytes."""

from __future__ import annotations

import torch

from kvstore_workers.model.codec import F32Codec, RowCodec
from kvstore_workers.model.config import TILE


class SlidingRows:
    """Rows by absolute position, of which at least the last `keep` before the newest tile stay readable.

    Positions that were never written read as `fill`, those below 0 as `before`.
    """

    def __init__(
        self,
        width: int,
        *,
        keep: int,
        dtype: torch.dtype,
        device: torch.device,
        position: int = 0,
        before: torch.Tensor | None = None,
    ) -> None:
        self.keep = keep
        self.base = position // TILE * TILE - keep
        self.rows = torch.zeros(keep + 2 * TILE, width, dtype=dtype, device=device)
        if before is not None and self.base < 0:
            self.rows[: -self.base] = before

    def cover(self, end: int) -> None:
        """Make rows up to `end` addressable; drops the oldest."""
        if end <= self.base + self.rows.shape[0]:
            return
        base = (end - 1) // TILE * TILE - self.keep
        kept = self.rows[base - self.base :].clone()
        self.rows.zero_()
        self.rows[: kept.shape[0]] = kept
        self.base = base

    def write(self, first: int, rows: torch.Tensor) -> None:
        """`rows` become those from position `first` on; the span was covered."""
        start = first - self.base
        self.rows[start : start + rows.shape[0]] = rows

    def read(self, first: int, last: int) -> torch.Tensor:
        """A view of [first, last)."""
        assert first >= self.base, f"rows before {self.base} were dropped, {first} was asked for"
        return self.rows[first - self.base : last - self.base]

    def fork(self) -> SlidingRows:
        twin = object.__new__(SlidingRows)
        twin.keep, twin.base, twin.rows = self.keep, self.base, self.rows.clone()
        return twin


class WindowRows:
    """A layer's window rows: stored bytes and the numbers that attention reads."""

    def __init__(
        self,
        codec: RowCodec,
        dim: int,
        *,
        keep: int,
        dtype: torch.dtype,
        device: torch.device,
        position: int = 0,
    ) -> None:
        self._codec = codec
        self._dtype = dtype
        self.values = SlidingRows(dim, keep=keep, dtype=dtype, device=device, position=position)
        # float32 rows in a float32 model are their own bytes
        self._packed: SlidingRows | None = None
        if not (isinstance(codec, F32Codec) and dtype is torch.float32):
            self._packed = SlidingRows(
                codec.row_bytes,
                keep=keep,
                dtype=torch.uint8,
                device=device,
                position=position,
            )

    def cover(self, end: int) -> None:
        self.values.cover(end)
        if self._packed is not None:
            self._packed.cover(end)

    def write(self, first: int, rows: torch.Tensor) -> None:
        """float32 [n, dim] rows of positions first, first + 1, ..."""
        if self._packed is None:
            self.values.write(first, rows)
        else:
            self.load(first, self._codec.encode(rows))

    def load(self, first: int, packed: torch.Tensor) -> None:
        """uint8 [n, row_bytes], as stored."""
        if self._packed is not None:
            self._packed.write(first, packed)
        self.values.write(first, self._codec.decode(packed).to(self._dtype))

    def packed(self, first: int, last: int) -> torch.Tensor:
        """uint8 [last - first, row_bytes]."""
        if self._packed is not None:
            return self._packed.read(first, last)
        return self._codec.encode(self.values.read(first, last))

    def fork(self) -> WindowRows:
        twin = object.__new__(WindowRows)
        twin._codec, twin._dtype, twin.values = self._codec, self._dtype, self.values.fork()
        twin._packed = None if self._packed is None else self._packed.fork()
        return twin


class GrowingRows:
    """Entries or index keys of one layer, by index; appended, never changed. Memory doubles when it is full.

    The first of them may be announced (`expect`) and come later (`place`); what is appended meanwhile lies behind them.
    """

    def __init__(
        self, codec: RowCodec, dim: int, *, dtype: torch.dtype, device: torch.device, capacity: int
    ) -> None:
        self._codec = codec
        self._dtype = dtype
        self.count = 0
        self._values = torch.zeros(capacity, dim, dtype=dtype, device=device)
        self._packed: torch.Tensor | None = None
        if not (isinstance(codec, F32Codec) and dtype is torch.float32):
            self._packed = torch.zeros(capacity, codec.row_bytes, dtype=torch.uint8, device=device)

    def reserve(self, rows: int) -> None:
        if rows > self._values.shape[0]:
            capacity = max(rows, 2 * self._values.shape[0])
            self._values = _grown(self._values, self.count, capacity)
            if self._packed is not None:
                self._packed = _grown(self._packed, self.count, capacity)

    def expect(self, rows: int) -> None:
        """Leave room for the first `rows`, which `place` brings; nothing is here yet."""
        assert self.count == 0, f"{self.count} entries lie where {rows} are expected"
        self.reserve(rows)
        self.count = rows

    def place(self, first: int, packed: torch.Tensor) -> None:
        """Expected entries first, first + 1, ...: uint8 [n, row_bytes], as stored."""
        end = first + packed.shape[0]
        assert end <= self.count, f"{self.count} entries are expected, {end} came"
        if self._packed is not None:
            self._packed[first:end] = packed
        self._values[first:end] = self._codec.decode(packed).to(self._dtype)

    def append(self, rows: torch.Tensor) -> None:
        """float32 [n, dim]."""
        if self._packed is None:
            self.reserve(self.count + rows.shape[0])
            self._values[self.count : self.count + rows.shape[0]] = rows
            self.count += rows.shape[0]
        else:
            self.load(self._codec.encode(rows))

    def load(self, packed: torch.Tensor) -> None:
        """Append uint8 [n, row_bytes], as stored."""
        first = self.count
        self.reserve(first + packed.shape[0])
        self.count = first + packed.shape[0]
        self.place(first, packed)

    def values(self, rows: int) -> torch.Tensor:
        """A view of the first `rows`, finite also where nothing was appended yet."""
        self.reserve(rows)
        return self._values[:rows]

    def packed(self, first: int, last: int) -> torch.Tensor:
        """uint8 [last - first, row_bytes] of entries [first, last)."""
        assert last <= self.count, f"{self.count} entries exist, {last} were asked for"
        if self._packed is not None:
            return self._packed[first:last]
        return self._codec.encode(self._values[first:last])

    def fork(self) -> GrowingRows:
        twin = object.__new__(GrowingRows)
        twin._codec, twin._dtype, twin.count = self._codec, self._dtype, self.count
        twin._values = self._values.clone()
        twin._packed = None if self._packed is None else self._packed.clone()
        return twin


def _grown(rows: torch.Tensor, count: int, capacity: int) -> torch.Tensor:
    grown = torch.zeros(capacity, rows.shape[1], dtype=rows.dtype, device=rows.device)
    grown[:count] = rows[:count]
    return grown
