"""A simulated directory that forgets what was not synced, and fails, lies and fills up on request. Seeded: a run can
be repeated.

Two states are kept for each file, what programs see and what the device holds, and likewise for the names. A power
cut keeps any subset of the unsynced 512-byte sectors and the first few of the unsynced changes of names. Sectors that
a fault bent at rest are remembered, so that a test knows what it may miss and what it may not.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvstore.errors import DeviceError, DirectoryInUse, KvstoreError, NoSpace
from kvstore.store.catalog import LmdbCatalog, Loaded, RamCatalog
from kvstore.types import BytesLike

_SECTOR = 512
_PAGE = 4096


class PowerCut(BaseException):
    """The simulated machine stops here. Not an Exception: nothing in a program may catch it."""


@dataclass(slots=True)
class Inode:
    """A file, under whatever names."""

    seen: bytearray = field(default_factory=bytearray)
    held: bytearray = field(default_factory=bytearray)
    dirty: set[int] = field(default_factory=set)
    """Sectors that the next sync would write."""
    lost: set[int] = field(default_factory=set)
    """Sectors that a failed sync dropped: seen until memory forgets them, and never written any more."""
    older: dict[int, memoryview] = field(default_factory=dict)
    """By page: what it held before it was written the last time."""
    bent: set[int] = field(default_factory=set)
    """Sectors that a fault left with other bytes than a program wrote there last."""
    bulk: bool = False


class SimDevice:
    """A Device in RAM.

    short_writes: single writes stop early now and then. `calls` counts the calls that could fail; `writes` are the
    numbers of those that wrote, `changing` of those that a full disk may refuse. `fail_at`, `cut_at` and `shorten_at`
    name calls by that count. `watch`, when given, is called after each change with this device.

    capacity: bytes of the whole device, None for no limit; `taken`: what others use of it. Files grow in pages, and
    what does not fit raises NoSpace. `read_only`: every change raises NoSpace, as a file system does that was mounted
    again after an error.
    """

    def __init__(self, seed: int, *, short_writes: bool = False, capacity: int | None = None) -> None:
        self.random = random.Random(seed)
        self.short_writes = short_writes
        self.capacity = capacity
        self.taken = 0
        self.read_only = False
        self.calls = 0
        self.writes: list[int] = []
        self.changing: list[int] = []
        self.watch: Callable[[SimDevice], None] | None = None
        self._failures: dict[int, KvstoreError] = {}
        self._cut_at = self._short_at = 0
        self._names: dict[str, Inode] = {}
        self._held_names: dict[str, Inode] = {}
        self._name_changes: list[tuple[str, str, Inode | None]] = []
        self._locked = False
        self._epoch = 0
        self._misreads = 0
        self._misdirected = 0
        self._stale = 0

    # For tests ---------------------------------------------------------------------------------------------------

    def fail_at(self, call: int, error: KvstoreError) -> None:
        """The call with this number, counted from 1, fails; a write may have done part of its work."""
        self._failures[call] = error

    def heal(self) -> None:
        """Nothing that was asked for and has not happened yet will happen."""
        self._failures.clear()
        self._cut_at = self._short_at = 0
        self._misreads = self._misdirected = self._stale = 0

    def cut_at(self, call: int) -> None:
        """Power goes while the call with this number is at work: it raises PowerCut. Then call `crash`."""
        self._cut_at = call

    def shorten_at(self, call: int) -> None:
        """The call with this number, if it is a write, stops after some of its bytes and says so."""
        self._short_at = call

    def misread(self, count: int) -> None:
        """The next `count` reads come back with one bit flipped; the bytes at rest are right."""
        self._misreads = count

    def misdirect(self, count: int) -> None:
        """The next `count` writes to bulk files land on other pages, perhaps of another file, and say that all is well."""
        self._misdirected = count

    def read_stale(self, count: int) -> None:
        """The next `count` reads that cover a page with an earlier life come back with what it held then, once."""
        self._stale = count

    def turn_back(self) -> bool:
        """One page that was written more than once holds its older bytes again, for good; False when there is none."""
        choice = [(name, page) for name, inode in self._names.items() for page in sorted(inode.older)]
        if not choice:
            return False
        name, page = self.random.choice(choice)
        inode = self._names[name]
        old = bytes(inode.older[page])
        at = page * _PAGE
        if at + len(old) > len(inode.seen) or inode.seen[at : at + len(old)] == old:
            return False
        self._damage(inode, at, old)
        return True

    def flip(self, name: str, bit: int) -> None:
        """One bit of a file changes at rest, whoever reads it."""
        inode = self._names[name]
        self._damage(inode, bit // 8, bytes([inode.seen[bit // 8] ^ 1 << bit % 8]))

    def bent(self, name: str, begin: int = 0, end: int | None = None) -> list[int]:
        """The sectors of bytes [begin, end) of a file that a fault bent and that were not written since."""
        inode = self._names.get(name)
        if inode is None:
            return []
        last = len(inode.seen) if end is None else end
        return sorted(at for at in inode.bent if begin < (at + 1) * _SECTOR and at * _SECTOR < last)

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
            inode.older = {page: old for page, old in inode.older.items() if page * _PAGE < size}

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
        self._names[name] = self._held_names[name] = Inode(bytearray(data), bytearray(data))

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

    @property
    def buffered_because(self) -> str:
        return "it is simulated"

    def lock(self) -> None:
        self.step(changes=True)
        if self._locked:
            raise DirectoryInUse(
                "another process (pid 1) holds the store", field="directory", value=self.where
            )
        self._locked = True

    def names(self) -> list[str]:
        return sorted(self._names)

    def create(self, name: str, *, bulk: bool = False) -> SimFile:
        self.step(changes=True)
        if name in self._names:
            raise DeviceError(f"cannot create {name}: it exists")
        return self._file(self._change(name, "", Inode(bulk=bulk)), bulk=bulk)

    def open(self, name: str, *, bulk: bool = False) -> SimFile | None:
        self.step()
        inode = self._names.get(name)
        return None if inode is None else self._file(inode, bulk=bulk)

    def rename(self, old: str, new: str) -> None:
        self.step(changes=True)
        if old not in self._names:
            raise DeviceError(f"cannot rename {old}: there is none")
        self._change(old, new, self._names[old])

    def unlink(self, name: str) -> None:
        self.step(changes=True)
        if name in self._names:
            self._change(name, "", None)

    def sync_names(self) -> None:
        self.step()
        self._held_names = dict(self._names)
        self._name_changes.clear()

    def allocated(self, name: str) -> int:
        inode = self._names.get(name)
        return 0 if inode is None else _pages(len(inode.seen))

    def free_bytes(self) -> int:
        if self.capacity is None:
            return 1 << 60
        return max(0, self.capacity - self.taken - self.total_allocated())

    def close(self) -> None:
        self._locked = False

    # For SimFile -------------------------------------------------------------------------------------------------

    def step(self, *, changes: bool = False) -> None:
        """Count a call; fail or cut when it is its turn."""
        error = self.failure(changes=changes)
        if error is not None:
            raise error

    def failure(self, *, changes: bool = False) -> BaseException | None:
        self.calls += 1
        if changes:
            self.changing.append(self.calls)
        if self.calls == self._cut_at:
            return PowerCut(f"call {self.calls}")
        if changes and self.read_only:
            return NoSpace("the file system is mounted read-only (EROFS)", value="EROFS")
        return self._failures.pop(self.calls, None)

    def stops_short(self) -> bool:
        """Whether the write that was just counted does only a part."""
        return self.calls == self._short_at or (self.short_writes and self.random.random() < 0.3)

    def refuse_growth(self, before: int, after: int) -> None:
        """Raise NoSpace when a file cannot grow from so many bytes to so many."""
        more = _pages(after) - _pages(before)
        if self.capacity is not None and more > max(0, self.capacity - self.taken - self.total_allocated()):
            raise NoSpace("the file system is full (ENOSPC)", value="ENOSPC")

    def wrong_place(self, length: int) -> tuple[Inode, int] | None:
        """Where a write of so many bytes lands instead, when one is due and there is such a place."""
        if self._misdirected <= 0:
            return None
        room = [inode for inode in self._names.values() if inode.bulk and len(inode.seen) >= length]
        if not room:
            return None
        self._misdirected -= 1
        inode = self.random.choice(room)
        return inode, self.random.randint(0, (len(inode.seen) - length) // _PAGE) * _PAGE

    def stale_of(self, inode: Inode, offset: int, data: bytes) -> bytes:
        """What a read brings, perhaps with one page as it was in an earlier life."""
        if self._stale <= 0:
            return data
        pages = range(-(-offset // _PAGE), (offset + len(data)) // _PAGE)
        choice = [page for page in pages if page in inode.older]
        if not choice:
            return data
        self._stale -= 1
        page = self.random.choice(choice)
        at = page * _PAGE - offset
        return data[:at] + bytes(inode.older[page]) + data[at + _PAGE :]

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

    def set_size(self, name: str, size: int) -> None:
        """The size of a file whose bytes somebody else keeps."""
        inode = self._names.get(name)
        if inode is None:
            inode = self._names[name] = self._held_names[name] = Inode()
        inode.seen = inode.held = bytearray(size)
        self.changed()

    def _file(self, inode: Inode, *, bulk: bool) -> SimFile:
        return SimFile(self, inode, self._epoch, bulk=bulk)

    def _damage(self, inode: Inode, at: int, data: bytes) -> None:
        for state in (inode.seen, inode.held):
            if len(state) >= at + len(data):
                state[at : at + len(data)] = data
        inode.bent.update(_sectors(at, len(data)))

    def _change(self, old: str, new: str, inode: Inode | None) -> Inode:
        _apply(self._names, old, new, inode)
        self._name_changes.append((old, new, inode))
        self.changed()
        return inode if inode is not None else Inode()


class SimFile:
    """A DeviceFile of a SimDevice. Of a bulk file it takes whole pages only, as an unbuffered one would."""

    def __init__(self, device: SimDevice, inode: Inode, epoch: int, *, bulk: bool) -> None:
        self._device = device
        self._inode = inode
        self._epoch = epoch
        self._bulk = bulk

    def pwritev(self, offset: int, parts: Sequence[BytesLike]) -> int:
        self._device.alive(self._epoch)
        data = b"".join(bytes(part) for part in parts)
        self._whole_pages(offset, len(data))
        error = self._device.failure(changes=True)
        self._device.writes.append(self._device.calls)
        chance = self._device.random
        if error is not None and self._device.read_only:
            raise error
        if error is not None:
            # A failed write may have done any part of its work.
            for at in range(0, len(data), _SECTOR):
                if chance.random() < 0.5:
                    _put(self._inode, offset + at, data[at : at + _SECTOR])
            raise error
        if self._device.stops_short() and len(data) > 1:
            data = data[: chance.randint(1, len(data) - 1)]
        elsewhere = self._device.wrong_place(len(data)) if self._bulk else None
        if elsewhere is not None and elsewhere != (self._inode, offset):
            _put(*elsewhere, data, as_asked=False)
            self._inode.bent.update(_sectors(offset, len(data)))
        else:
            self._device.refuse_growth(len(self._inode.seen), offset + len(data))
            _put(self._inode, offset, data)
        self._device.changed()
        return len(data)

    def read_into(self, offset: int, target: memoryview) -> int:
        self._whole_pages(offset, len(target))
        data = self.pread(offset, len(target))
        target[: len(data)] = data
        return len(data)

    def _whole_pages(self, offset: int, length: int) -> None:
        assert not self._bulk or (offset % _PAGE == 0 and length % _PAGE == 0), (offset, length)

    def pread(self, offset: int, length: int) -> bytes:
        self._device.alive(self._epoch)
        self._device.step()
        data = bytes(self._inode.seen[offset : offset + length])
        return self._device.misread_of(self._device.stale_of(self._inode, offset, data))

    def allocate(self, size: int) -> None:
        self._device.alive(self._epoch)
        self._device.step(changes=True)
        self._device.refuse_growth(len(self._inode.seen), size)
        if size > len(self._inode.seen):
            self._inode.seen.extend(bytes(size - len(self._inode.seen)))
        self._device.changed()

    def truncate(self, size: int) -> None:
        self._device.alive(self._epoch)
        error = self._device.failure(changes=True)
        if error is not None and self._device.read_only:
            raise error
        if error is None or self._device.random.random() < 0.5:
            del self._inode.seen[size:]
        self._sync(error)
        self._device.changed()

    def size(self) -> int:
        self._device.alive(self._epoch)
        return len(self._inode.seen)

    def sync(self) -> None:
        self._device.alive(self._epoch)
        error = self._device.failure()
        self._device.changing.append(self._device.calls)
        self._sync(error)

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

    def _sync(self, error: BaseException | None) -> None:
        inode = self._inode
        if error is None:
            size = len(inode.seen)
            del inode.held[size:]
            inode.held.extend(bytes(size - len(inode.held)))
            for begin, end in _runs(inode.dirty):
                inode.held[begin:end] = inode.seen[begin:end]
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


class SimCatalog(RamCatalog):
    """A catalogue whose file lies on a simulated device: it counts there, fails with it, and grows and never shrinks.
    A transaction is durable as a whole, or leaves nothing behind."""

    def __init__(self, device: SimDevice) -> None:
        super().__init__()
        self._device = device

    def load(self) -> Loaded:
        self._device.step()
        return super().load()

    def write(self, changes: Mapping[bytes, bytes | None], *, bytes_max: int) -> bool:
        error = self._device.failure(changes=True)
        if isinstance(error, PowerCut):
            if self._device.random.random() < 0.5:
                super().write(changes, bytes_max=bytes_max)
            raise error
        before = dict(self.rows)
        if error is not None or not super().write(changes, bytes_max=bytes_max):
            return False
        held = self._device.allocated(LmdbCatalog.DATA_NAME)
        # Its first pages, and a page in two that is used again only later.
        size = max(held, _pages(2 * sum(len(key) + len(row) for key, row in self.rows.items())) + 4 * _PAGE)
        try:
            if size > bytes_max:
                raise NoSpace("the catalogue would outgrow its limit")
            self._device.refuse_growth(held, size)
        except NoSpace:
            self.rows = before
            return False
        self._device.set_size(LmdbCatalog.DATA_NAME, size)
        return True


def _put(inode: Inode, offset: int, data: bytes, *, as_asked: bool = True) -> None:
    seen = inode.seen
    if offset > len(seen):
        seen.extend(bytes(offset - len(seen)))
    if inode.bulk:
        first = offset // _PAGE
        before = memoryview(bytes(seen[first * _PAGE : _pages(offset + len(data))]))
        inode.older.update(
            (first + at // _PAGE, before[at : at + _PAGE]) for at in range(0, len(before) - _PAGE + 1, _PAGE)
        )
    seen[offset : offset + len(data)] = data
    sectors = _sectors(offset, len(data))
    inode.dirty.update(sectors)
    inode.lost.difference_update(sectors)
    if as_asked:
        inode.bent.difference_update(sectors)
    else:
        inode.bent.update(sectors)


def _runs(sectors: set[int]) -> Iterator[tuple[int, int]]:
    """Bytes [begin, end) of sectors, those of one write as one piece."""
    if sectors and max(sectors) - min(sectors) + 1 == len(sectors):
        yield min(sectors) * _SECTOR, (max(sectors) + 1) * _SECTOR
    else:
        yield from ((at * _SECTOR, (at + 1) * _SECTOR) for at in sectors)


def _sectors(offset: int, length: int) -> range:
    return range(offset // _SECTOR, -(-(offset + length) // _SECTOR))


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def flipped(data: bytes, bit: int) -> bytes:
    """The bytes with one bit changed."""
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def _apply(names: dict[str, Inode], old: str, new: str, inode: Inode | None) -> None:
    """Create or rename (inode given), or remove."""
    if inode is None:
        names.pop(old, None)
    elif new:
        if names.pop(old, None) is not None:
            names[new] = inode
    else:
        names[old] = inode
