"""File systems on devices of our own: context managers that leave nothing behind, whatever happens inside."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from enum import StrEnum
from pathlib import Path

from kvstore.chaos.base import ChaosFailed
from kvstore.chaos.tools import program, run

PLUGIN = Path(__file__).with_name("nbd_device.py")
_WAIT_STEPS = 500
_WAIT_SECONDS = 0.02
_UMOUNT_TRIES = 50


class NotMounted(ChaosFailed):
    """The system did not mount what is on a device."""

    code = "NOT_MOUNTED"


class FileSystem(StrEnum):
    EXT4 = "ext4"
    XFS = "xfs"


def make_file_system(kind: FileSystem, image: Path, *, size: int, options: tuple[str, ...] = ()) -> None:
    """A new file of `size` bytes with an empty file system. options: further ones of its mkfs."""
    with image.open("wb") as file:
        file.truncate(size)
    if kind is FileSystem.XFS:
        # xfs refuses images below 300 MB otherwise.
        run("mkfs.xfs", "--unsupported", "-q", "-f", "-K", *options, image)
    else:
        run("mkfs.ext4", "-q", "-F", "-b", "4096", "-E", "nodiscard,lazy_itable_init=0", *options, image)


SCRATCH_BYTES_MIN = 1 << 30


@contextmanager
def scratch_folder(where: str | None) -> Iterator[Path]:
    """A fresh folder, in memory unless `where` names a folder to make it in; removed afterwards."""
    if where is not None and not Path(where).is_dir():
        raise ChaosFailed(
            "no such folder", field="--dir", value=where, allowed="an existing folder for scratch files"
        )
    memory = Path("/dev/shm")
    parent = where or (str(memory) if memory.is_dir() else tempfile.gettempdir())
    # Images are sparse: one that meets a full folder looks like a device that loses what it has taken.
    free = shutil.disk_usage(parent).free
    if free < SCRATCH_BYTES_MIN:
        raise ChaosFailed(
            "too little room for scratch files; --dir names another folder",
            field="--dir",
            value=f"{parent} with {free >> 20} MiB free",
            allowed=f"{SCRATCH_BYTES_MIN >> 20} MiB free or more",
        )
    with tempfile.TemporaryDirectory(
        prefix="kvstore-chaos-", dir=parent, ignore_cleanup_errors=True
    ) as folder:
        yield Path(folder)


@contextmanager
def mounted(device: Path, target: Path, *options: str) -> Iterator[Path]:
    """A file or device with a file system, mounted on a folder. The loop device goes with the mount."""
    target.mkdir(exist_ok=True)
    try:
        run("mount", "-o", ",".join(("loop", *options)), device, target)
    except ChaosFailed as error:
        raise NotMounted(str(error)) from error
    try:
        yield target
    finally:
        unmount(target)


@contextmanager
def mounted_memory(target: Path, *, size: int) -> Iterator[Path]:
    """A tmpfs of `size` bytes."""
    target.mkdir(exist_ok=True)
    run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", target)
    try:
        yield target
    finally:
        unmount(target)


def unmount(target: Path) -> None:
    """A child that was just killed may hold files for a moment longer."""
    for left in reversed(range(_UMOUNT_TRIES)):
        try:
            run("umount", target)
            return
        except ChaosFailed:
            if not left:
                # Detached now, gone with its last user: better than a mount that stays.
                run("umount", "-l", target)
                raise
        wait(_WAIT_SECONDS)


@contextmanager
def served(
    image: Path, scratch: Path, *, log: Path | None = None, switch: Path | None = None
) -> Iterator[Path]:
    """A file that is a block device: `image`'s contents in memory, its writes logged in `log`, its faults in `switch`.

    `image` itself never changes.
    """
    folder = scratch / "nbd"
    folder.mkdir(exist_ok=True)
    socket, device, ready = folder / "socket", folder / "device", folder / "pid"
    for old in (socket, ready):
        old.unlink(missing_ok=True)
    device.touch()
    parameters = [f"image={image}"]
    parameters += [f"log={log}"] if log is not None else []
    parameters += [f"switch={switch}"] if switch is not None else []
    with ExitStack() as stack:
        stack.enter_context(
            # It says a line for each request that fails, and would wait for somebody to read it.
            _process(
                [
                    program("nbdkit"),
                    "-f",
                    "-P",
                    str(ready),
                    "-U",
                    str(socket),
                    "python",
                    str(PLUGIN),
                    *parameters,
                ]
            )
        )
        _wait_until(ready.exists, "nbdkit did not start")
        ready.unlink()
        stack.enter_context(
            _process([program("nbdfuse"), "-P", str(ready), str(device), "--unix", str(socket)])
        )
        stack.callback(_unmount_quietly, device)
        _wait_until(ready.exists, "nbdfuse did not start")
        yield device


def wait(seconds: float) -> None:
    threading.Event().wait(seconds)


def _wait_until(true: object, failure: str) -> None:
    assert callable(true)
    for _ in range(_WAIT_STEPS):
        if true():
            return
        wait(_WAIT_SECONDS)
    raise ChaosFailed(f"{failure} within {_WAIT_STEPS * _WAIT_SECONDS:g} s")


def _unmount_quietly(device: Path) -> None:
    with suppress(ChaosFailed):
        unmount(device)


@contextmanager
def _process(command: list[str]) -> Iterator[None]:
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
