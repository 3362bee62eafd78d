"""Programs and rights that attacks on real devices need, and the words for those that are missing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from kvstore.chaos.base import ChaosFailed, MissingTool

PACKAGES = {
    "nbdkit": "nbdkit",
    "nbdfuse": "libnbd-bin",
    "losetup": "mount",
    "mount": "mount",
    "umount": "mount",
    "mkfs.ext4": "e2fsprogs",
    "mkfs.xfs": "xfsprogs",
    "mkfs.btrfs": "btrfs-progs",
    "btrfs": "btrfs-progs",
    "sync": "coreutils",
}
"""The Debian package that brings each program. The plugin for Python comes in nbdkit-plugin-python."""

_EVERYWHERE = "/usr/sbin:/sbin:/usr/bin:/bin"
_CAP_SYS_ADMIN = 21


def program(name: str) -> str:
    """Where a program is. Raises MissingTool, which names the package."""
    path = shutil.which(name) or shutil.which(name, path=_EVERYWHERE)
    if path is None:
        raise MissingTool(
            f"the program {name} is not installed; install the Debian package {PACKAGES[name]} "
            "(`make chaos-tools` installs all that chaos needs)"
        )
    return path


def run(name: str, *arguments: str | Path) -> str:
    """Run a program to its end; what it printed. Raises MissingTool, or ChaosFailed with its complaint."""
    command = [program(name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        complaint = (done.stderr.strip() or done.stdout.strip() or "without a word").splitlines()[0]
        raise ChaosFailed(f"{name} failed with status {done.returncode}: {complaint}")
    return done.stdout


def what_mounts_lack() -> str:
    """Why nothing can be mounted from a file here; empty when it can."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("CapEff:") and not int(line.split()[1], 16) >> _CAP_SYS_ADMIN & 1:
            return "mounting needs root (CAP_SYS_ADMIN); run as root, or in a container that grants it"
    if not Path("/dev/loop-control").exists():
        return (
            "mounting an image needs /dev/loop-control; load the kernel's loop module, or pass the device in"
        )
    return _missing("mount", "umount", "losetup", "mkfs.ext4", "mkfs.xfs")


def what_block_devices_lack() -> str:
    """Why no block device of our own can be served here; empty when one can."""
    if missing := _missing("nbdkit", "nbdfuse"):
        return missing
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "nbdfuse needs /dev/fuse, readable and writable; load the kernel's fuse module, or pass the device in"
    done = subprocess.run(
        [program("nbdkit"), "--dump-plugin", "python"], capture_output=True, check=False, timeout=30
    )
    if done.returncode:
        return "nbdkit has no plugin for Python; install the Debian package nbdkit-plugin-python"
    return ""


def need_mounts() -> None:
    if lack := what_mounts_lack():
        raise MissingTool(lack)


def need_block_devices() -> None:
    need_mounts()
    if lack := what_block_devices_lack():
        raise MissingTool(lack)


def _missing(*names: str) -> str:
    for name in names:
        try:
            program(name)
        except MissingTool as error:
            return str(error)
    return ""
