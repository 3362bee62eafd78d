"""Transfers that the kernel carries out by itself (Linux native asynchronous I/O), for files opened O_DIRECT.

One thread keeps as many of them under way as a drive wants, and checks what has come while others are on their way. The same
with a thread for each transfer costs several switches of the interpreter's lock a block, which is more than the checks.
There is no library for it that takes memory at page boundaries, so the four system calls are made by ctypes.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
import threading
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from itertools import chain

from kvstore.errors import KvstoreError
from kvstore.store.device import PosixFile
from kvstore.store.lanes import LANES, ThreadLanes, Transfer

_CALLS = {
    "x86_64": (206, 207, 208, 209),
    "aarch64": (0, 1, 4, 2),
}
"""Numbers of io_setup, io_destroy, io_getevents and io_submit."""

_READ, _WRITE = 0, 1
_ONE = ctypes.c_long(1)


_CONTROL_BLOCK = struct.Struct("<QIIHhiQQqQII")
"""struct iocb of linux/aio_abi.h, for little-endian machines: data, key, flags of the call, operation, priority, descriptor, buffer,
length, offset, reserved, flags, descriptor of events. The descriptor has a sign, so that one that is closed is the kernel's to refuse."""

_EVENT = struct.Struct("<QQqq")
"""struct io_event: data, block, result, a second result."""


class _Kernel:
    """The system calls. Errors are OSError. Waiting releases the interpreter's lock."""

    def __init__(self) -> None:
        numbers = _CALLS.get(platform.machine())
        if sys.platform != "linux" or sys.byteorder != "little" or numbers is None:
            raise OSError(errno.ENOSYS, "no native asynchronous I/O is known for this machine")
        self.setup, self.destroy, self.getevents, self.submit = numbers
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._syscall.restype = ctypes.c_long

    def call(self, number: int, *arguments: object) -> int:
        result = int(self._syscall(ctypes.c_long(number), *arguments))
        if result < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return result


class _Context:
    """Up to `size` transfers under way. For one thread at a time."""

    def __init__(self, kernel: _Kernel, size: int) -> None:
        self._kernel = kernel
        self._id = ctypes.c_ulong(0)
        kernel.call(kernel.setup, ctypes.c_ulong(size), ctypes.byref(self._id))
        self._size = size
        # Packed whole: to set a field after another of a structure took longer than all the rest of a transfer.
        self._blocks = ctypes.create_string_buffer(_CONTROL_BLOCK.size * size)
        first = ctypes.addressof(self._blocks)
        self._pointers = [
            (ctypes.c_uint64 * 1)(first + _CONTROL_BLOCK.size * number) for number in range(size)
        ]
        self._events = ctypes.create_string_buffer(_EVENT.size * size)
        self._free = list(range(size))
        self._under_way: dict[int, tuple[Transfer, object]] = {}

    @property
    def under_way(self) -> int:
        return len(self._under_way)

    def begin(self, transfer: Transfer, descriptor: int) -> None:
        """Hand a transfer to the kernel. OSError where it does not take it; then nothing has begun."""
        memory = ctypes.c_char.from_buffer(transfer.view)
        number = self._free[-1]
        _CONTROL_BLOCK.pack_into(
            self._blocks,
            _CONTROL_BLOCK.size * number,
            number,
            0,
            0,
            _WRITE if transfer.is_write else _READ,
            0,
            descriptor,
            ctypes.addressof(memory),
            len(transfer.view),
            transfer.offset,
            0,
            0,
            0,
        )
        self._free.pop()
        # The kernel writes to this memory or reads from it: it is kept, whatever the caller does.
        self._under_way[number] = (transfer, memory)
        try:
            self._kernel.call(self._kernel.submit, self._id, _ONE, self._pointers[number])
        except OSError:
            del self._under_way[number]
            self._free.append(number)
            raise

    def wait(self) -> list[tuple[Transfer, int]]:
        """At least one transfer that is over, with bytes moved or a negative error number."""
        while True:
            try:
                count = self._kernel.call(
                    self._kernel.getevents,
                    self._id,
                    _ONE,
                    ctypes.c_long(self._size),
                    self._events,
                    None,
                )
                break
            except InterruptedError:
                continue
        over = []
        for number, _, result, _ in _EVENT.iter_unpack(memoryview(self._events)[: _EVENT.size * count]):
            transfer, _ = self._under_way.pop(number)
            self._free.append(number)
            over.append((transfer, result))
        return over

    def close(self) -> None:
        """Waits for what is under way."""
        with suppress(OSError):  # in a forked child it is not this process's
            self._kernel.call(self._kernel.destroy, self._id)


class KernelLanes(ThreadLanes):
    """The kernel's own lanes for files opened O_DIRECT, threads for the rest and where the kernel has none to give."""

    def __init__(self) -> None:
        super().__init__()
        self._kernel = _kernel()
        self._turn = threading.Lock()
        self._closed = False
        self._idle: list[_Context] = []

    def move(self, transfers: Iterable[Transfer]) -> Generator[Transfer, None, None]:
        coming = iter(transfers)
        first = next(coming, None)
        if first is None:
            return
        coming = chain([first], coming)
        context = self._context() if isinstance(first.file, PosixFile) and first.file.is_direct else None
        if context is None:
            yield from super().move(coming)
        else:
            yield from self._move(context, coming)

    def close(self) -> None:
        super().close()
        with self._turn:
            self._closed = True
            idle, self._idle = self._idle, []
        for context in idle:
            context.close()

    def _context(self) -> _Context | None:
        if self._kernel is None:
            return None
        with self._turn:
            if self._idle:
                return self._idle.pop()
        try:
            return _Context(self._kernel, LANES)
        except OSError:
            # A machine-wide limit, or a sandbox: threads do the same.
            return None

    def _move(self, context: _Context, coming: Iterator[Transfer]) -> Generator[Transfer, None, None]:
        is_known = False
        try:
            yield from self._steps(context, coming)
            is_known = True
        except (KvstoreError, GeneratorExit):
            is_known = True
            raise
        finally:
            if is_known:
                while context.under_way:
                    context.wait()
            self._let_go(context, may_be_kept=is_known)

    def _steps(self, context: _Context, coming: Iterator[Transfer]) -> Generator[Transfer, None, None]:
        while True:
            while context.under_way < LANES and (transfer := next(coming, None)) is not None:
                if not self._begun(context, transfer):
                    transfer.run()
                    yield transfer
            if not context.under_way:
                return
            for transfer, result in context.wait():
                _finish(transfer, result)
                yield transfer

    def _let_go(self, context: _Context, *, may_be_kept: bool) -> None:
        """Where an interrupt may have come between a system call and the books, only the kernel knows what is under way: it
        waits for that when the context goes."""
        with self._turn:
            if may_be_kept and not self._closed:
                self._idle.append(context)
                return
        context.close()

    def _begun(self, context: _Context, transfer: Transfer) -> bool:
        file = transfer.file
        assert isinstance(file, PosixFile)
        try:
            context.begin(transfer, file.fileno())
        except OSError:
            # Whatever the reason is, the plain call tells it.
            return False
        return True


def _kernel() -> _Kernel | None:
    try:
        return _Kernel()
    except OSError:
        return None


def _finish(transfer: Transfer, result: int) -> None:
    """What the kernel did of it, and the rest where that was not all."""
    if result == len(transfer.view):
        transfer.done = result
        return
    if result < 0:
        file = transfer.file
        assert isinstance(file, PosixFile)
        raise file.error("write" if transfer.is_write else "read", -result)
    # Short: the plain calls do it from its beginning.
    transfer.run()
