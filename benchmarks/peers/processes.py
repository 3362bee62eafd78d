"""Processes, ports and the page cache. Whatever is started here ends with the process that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.peers.base import PeerFailed

READY_SECONDS = 240.0
STOP_SECONDS = 10.0
POLL_SECONDS = 0.01
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)
_prctl = _libc.prctl


def inherited(**more: str) -> dict[str, str]:
    """This process's environment and more."""
    return {**os.environ, **more}


class Server:
    """A child process whose output goes to a file."""

    def __init__(self, command: Sequence[str], *, log: Path, environment: Mapping[str, str]) -> None:
        self.log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(environment),
                # Safe, since it calls nothing but prctl, which was looked up before.
                preexec_fn=_die_with_parent,  # noqa: PLW1509
            )

    def wait_for(self, ready: Callable[[], bool], *, what: str, seconds: float = READY_SECONDS) -> None:
        """PeerFailed with the last line of the log when the process ends first, or is not ready in time."""
        wait_until(lambda: self._process.poll() is not None or ready(), what=what, seconds=seconds)
        if self._process.poll() is not None:
            raise PeerFailed(
                f"{what}: the process ended with {self._process.returncode}: {self.last_words()}"
            )

    def last_words(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1][-300:] if lines else "without a word"

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()


def _die_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def wait_until(done: Callable[[], bool], *, what: str, seconds: float, poll: float = POLL_SECONDS) -> None:
    """Ask again and again: the other side has nothing that could wake us. PeerFailed when the time is over."""
    limit = time.monotonic() + seconds
    while not done():
        if time.monotonic() > limit:
            raise PeerFailed(f"{what}: not within {seconds:g} s")
        threading.Event().wait(poll)


def free_ports(count: int) -> list[int]:
    """Different ones, free at this moment."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 0.5).close()
    except OSError:
        return False
    return True


def files_below(directory: Path) -> list[Path]:
    return [Path(folder) / name for folder, _, names in os.walk(directory) for name in names]


def sync_files(directory: Path) -> None:
    """All that was written below it is on the device: one syncfs, which costs less than an fsync for each file."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if _libc.syncfs(descriptor) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(directory))
    finally:
        os.close(descriptor)


def drop_page_cache(directory: Path) -> str:
    """Nothing below the directory is in memory of the kernel afterwards; how that was done. It must have been synced."""
    if os.access(DROP_CACHES, os.W_OK):
        try:
            DROP_CACHES.write_text("3")
        except OSError:  # a container's root may not
            pass
        else:
            return "drop_caches"
    for path in files_below(directory):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    return "fadvise"
