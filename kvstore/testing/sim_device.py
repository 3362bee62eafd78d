"""A simulated directory that forgets what was not synced, and fails on request. Seeded: a run can be repeated.

Two states are kept for each file, what programs see and what the device holds, and likewise for the names. A power
cut keeps any subset of the unsynced 512-byte sectors and the first few of the unsynced changes of names.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.errors import DeviceError, DirectoryInUse, KvstoreError
from kvstore.types import BytesLike

_SECTOR = 512
_PAGE = 4096


class PowerCut(BaseException):
    """The simulated machine stops here. Not an Exception: nothing in a program may catch it."""


@dataclass(slots=True)
class _Inode:
    seen: bytearray = field(default_factory=bytearray)
    held: bytearray = field(default_factory=bytearray)
    dirty: set[int] = field(default_factory=set)
    """Sectors that the next sync would write."""
    lost: set[int] = field(default_factory=set)
    """Sectors that a failed sync dropped: seen until memory forgets them, and never written any more."""


class SimDevice:
    """A Device in RAM.

    short_writes: single writes stop early now and then. `calls` counts the calls that could fail. `fail_at` and
    `cut_at` name calls by that count. `watch`, when given, is called after each change with this device.
    """

    def __init__(self, seed: int, *, short_writes: bool = False) -> None:
        self.random = random.Random(seed)
        self.short_writes = short_writes
        self.calls = 0
        self.watch: Callable[[SimDevice], None] | None = None
        self._failures: dict[int, KvstoreError] = {}
        self._cut_at = 0
        self._names: dict[str, _Inode] = {}
        self._held_names: dict[str, _Inode] = {}
        self._name_changes: list[tuple[str, str, _Inode | None]] = []
        self._locked = False
        self._epoch = 0
        self._misreads = 0

    # For tests ---------------------------------------------------------------------------------------------------

    def fail_at(self, call: int, error: KvstoreError) -> None:
        """The call with this number, counted from 1, fails; a write may have done part of its work."""
        self._failures[call] = error

    def heal(self) -> None:
        """Nothing that was asked for and has not happened yet will happen."""
        self._failures.clear()
        self._cut_at = 0
        self._misreads = 0

    def cut_at(self, call: int) -> None:
        """Power goes while the call with this number is at work: it raises PowerCut. Then call `crash`."""
        self._cut_at = call

    def misread(self, count: int) -> None:
        """The next `count` reads come back with one bit flipped; the bytes at rest are right."""
        self._misreads = count

    def crash(self) -> None:
        """Power comes back: unsynced sectors are there or not, the lock is gone, open files are dead."""
        self._epoch += 1
        self._locked = False
        self.heal()
        kept = self.random.randint(0, len(self._name_changes))
        for old, new, inode in self._name_changes[:kept]:
            _apply(self._held_names, old, new, inode)
        self._name_changes.clear()
        self._names = dict(self._held_names)
        for inode in self._names.values():
            size = len(self.random.choice([inode.held, inode.seen]))
            data = inode.held.ljust(size, b"\0")[:size]
            for sector in inode.dirty:
                if self.random.random() < 0.5:
                    at = sector * _SECTOR
                    piece = inode.seen[at : at + _SECTOR][: max(0, size - at)]
                    data[at : at + len(piece)] = piece
            inode.seen, inode.held = bytearray(data), bytearray(data)
            inode.dirty.clear()
            inode.lost.clear()

    def kill(self) -> None:
        """The process dies and the machine lives: nothing is lost but the lock and the open files."""
        self._epoch += 1
        self._locked = False
        self.heal()

    def contents(self, name: str) -> bytearray:
        """The bytes of a file, seen and at rest: damage them in place."""
        inode = self._names[name]
        inode.held = inode.seen
        return inode.seen

    def replace(self, name: str, data: bytes) -> None:
        """Put a file there, or other bytes into one, durably and behind everybody's back."""
        self._names[name] = self._held_names[name] = _Inode(bytearray(data), bytearray(data))

    def remove(self, name: str) -> None:
        """Take a file away, durably and behind everybody's back."""
        self._names.pop(name)
        self._held_names.pop(name, None)

    def total_allocated(self) -> int:
        return sum(self.allocated(name) for name in self._names)

    # Device ------------------------------------------------------------------------------------------------------

    @property
    def where(self) -> str:
        return "simulated"

    def lock(self) -> None:
        self.step()
        if self._locked:
            raise DirectoryInUse(
                "another process (pid 1) holds the store", field="directory", value=self.where
            )
        self._locked = True

    def names(self) -> list[str]:
        return sorted(self._names)

    def create(self, name: str) -> SimFile:
        self.step()
        if name in self._names:
            raise DeviceError(f"cannot create {name}: it exists")
        return SimFile(self, self._change(name, "", _Inode()), self._epoch)

    def open(self, name: str) -> SimFile | None:
        self.step()
        inode = self._names.get(name)
        return None if inode is None else SimFile(self, inode, self._epoch)

    def rename(self, old: str, new: str) -> None:
        self.step()
        if old not in self._names:
            raise DeviceError(f"cannot rename {old}: there is none")
        self._change(old, new, self._names[old])

    def unlink(self, name: str) -> None:
        self.step()
        if name in self._names:
            self._change(name, "", None)

    def sync_names(self) -> None:
        self.step()
        self._held_names = dict(self._names)
        self._name_changes.clear()

    def allocated(self, name: str) -> int:
        inode = self._names.get(name)
        return 0 if inode is None else -(-len(inode.seen) // _PAGE) * _PAGE

    def close(self) -> None:
        self._locked = False

    # For SimFile -------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Count a call; fail or cut when it is its turn."""
        error = self.failure()
        if error is not None:
            raise error

    def failure(self) -> BaseException | None:
        self.calls += 1
        if self.calls == self._cut_at:
            return PowerCut(f"call {self.calls}")
        return self._failures.pop(self.calls, None)

    def alive(self, epoch: int) -> None:
        assert epoch == self._epoch, "a file was used that was opened before a crash"

    def changed(self) -> None:
        if self.watch is not None:
            self.watch(self)

    def misread_of(self, data: bytes) -> bytes:
        if not data or self._misreads <= 0:
            return data
        self._misreads -= 1
        bit = self.random.randrange(8 * len(data))
        return flipped(data, bit)

    def _change(self, old: str, new: str, inode: _Inode | None) -> _Inode:
        _apply(self._names, old, new, inode)
        self._name_changes.append((old, new, inode))
        self.changed()
        return inode if inode is not None else _Inode()


class SimFile:
    """A DeviceFile of a SimDevice."""

    def __init__(self, device: SimDevice, inode: _Inode, epoch: int) -> None:
        self._device = device
        self._inode = inode
        self._epoch = epoch

    def pwritev(self, offset: int, parts: Sequence[BytesLike]) -> int:
        self._device.alive(self._epoch)
        data = b"".join(bytes(part) for part in parts)
        error = self._device.failure()
        chance = self._device.random
        if error is not None:
            # A failed write may have done any part of its work.
            for at in range(0, len(data), _SECTOR):
                if chance.random() < 0.5:
                    self._put(offset + at, data[at : at + _SECTOR])
            raise error
        if self._device.short_writes and len(data) > 1 and chance.random() < 0.3:
            data = data[: chance.randint(1, len(data) - 1)]
        self._put(offset, data)
        self._device.changed()
        return len(data)

    def pread(self, offset: int, length: int) -> bytes:
        self._device.alive(self._epoch)
        self._device.step()
        return self._device.misread_of(bytes(self._inode.seen[offset : offset + length]))

    def allocate(self, size: int) -> None:
        self._device.alive(self._epoch)
        self._device.step()
        if size > len(self._inode.seen):
            self._inode.seen.extend(bytes(size - len(self._inode.seen)))
        self._device.changed()

    def truncate(self, size: int) -> None:
        self._device.alive(self._epoch)
        error = self._device.failure()
        if error is None or self._device.random.random() < 0.5:
            del self._inode.seen[size:]
        self._sync(error)
        self._device.changed()

    def size(self) -> int:
        self._device.alive(self._epoch)
        return len(self._inode.seen)

    def sync(self) -> None:
        self._device.alive(self._epoch)
        self._sync(self._device.failure())

    def forget_cached(self, offset: int, length: int) -> None:
        self._device.alive(self._epoch)
        inode = self._inode
        for sector in inode.lost:
            at = sector * _SECTOR
            piece = inode.held[at : at + _SECTOR].ljust(_SECTOR, b"\0")
            inode.seen[at : at + _SECTOR] = piece[: max(0, len(inode.seen) - at)]
        inode.lost.clear()

    def close(self) -> None:
        """Nothing to give back."""

    def _put(self, offset: int, data: bytes) -> None:
        seen = self._inode.seen
        if offset > len(seen):
            seen.extend(bytes(offset - len(seen)))
        seen[offset : offset + len(data)] = data
        sectors = range(offset // _SECTOR, -(-(offset + len(data)) // _SECTOR))
        self._inode.dirty.update(sectors)
        self._inode.lost.difference_update(sectors)

    def _sync(self, error: BaseException | None) -> None:
        inode = self._inode
        if error is None:
            size = len(inode.seen)
            del inode.held[size:]
            inode.held.extend(bytes(size - len(inode.held)))
            for sector in inode.dirty:
                at = sector * _SECTOR
                inode.held[at : at + _SECTOR] = inode.seen[at : at + _SECTOR]
            inode.dirty.clear()
            return
        if isinstance(error, PowerCut):
            raise error
        # As file systems do it: what could not be written counts as clean from now on, and is on no disk.
        for sector in list(inode.dirty):
            if self._device.random.random() < 0.5:
                at = sector * _SECTOR
                if at < len(inode.held):
                    inode.held[at : at + _SECTOR] = inode.seen[at : at + _SECTOR]
            else:
                inode.lost.add(sector)
        inode.dirty.clear()
        raise error


def flipped(data: bytes, bit: int) -> bytes:
    """The bytes with one bit changed."""
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def _apply(names: dict[str, _Inode], old: str, new: str, inode: _Inode | None) -> None:
    """Create or rename (inode given), or remove."""
    if inode is None:
        names.pop(old, None)
    elif new:
        if names.pop(old, None) is not None:
            names[new] = inode
    else:
        names[old] = inode
