"""The rivals' virtual environments, outside the tree, made once; and why a rival could not be put into one."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("requirements")
INSTALL_SECONDS = 900.0
TOOL_SECONDS = 300.0
ARCHIVES = Path("/var/cache/apt/archives")
IBVERBS = "libibverbs.so.1"
IBVERBS_PACKAGES = ("libibverbs1", "libnl-3-200", "libnl-route-3-200")
NEEDED = {
    "mooncake": ("common", "mooncake"),
    "lmcache": ("common", "torch", "lmcache"),
    "aibrix": ("common", "torch", "aibrix"),
}
"""Files of requirements of each rival, in the order in which they are installed."""
HOMES = {"mooncake": "mooncake", "lmcache": "tensors", "aibrix": "tensors"}
"""Names of their environments. LMCache imports Mooncake where it finds it, and may then fail for what that lacks."""
LIBRARY_FOLDERS = ("usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu")

Run = Callable[[Sequence[str], Path, float], None]
"""Runs a command in a folder, for so many seconds at most; NotInstalled where it fails."""


class NotInstalled(Exception):
    """Why a rival is not there, in one line."""


@dataclass(frozen=True, slots=True)
class Environment:
    """`variables`: what its processes need beside the usual ones."""

    python: Path
    variables: Mapping[str, str]

    @property
    def scripts(self) -> Path:
        return self.python.parent


def run_command(command: Sequence[str], folder: Path, seconds: float) -> None:
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=seconds, check=False
        )
    except FileNotFoundError as error:
        raise NotInstalled(f"{command[0]} is not there") from error
    except subprocess.TimeoutExpired as error:
        raise NotInstalled(f"{Path(command[0]).name} took more than {seconds:g} s") from error
    if done.returncode:
        raise NotInstalled(f"{Path(command[0]).name} failed: {last_line(done.stderr or done.stdout)}")


def last_line(text: str) -> str:
    """The last line that says something, at most 300 characters of it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][-300:] if lines else "without a word"


class Rivals:
    """Environments in the folder `home`, in which rivals are installed as they are asked for."""

    def __init__(self, home: Path, *, run: Run = run_command) -> None:
        self._home, self._run = home, run
        self._failures: dict[str, str] = {}

    def environment(self, rival: str) -> Environment:
        """With `rival`, one of NEEDED, installed. NotInstalled where that cannot be; it is not tried again by this object."""
        if rival in self._failures:
            raise NotInstalled(self._failures[rival])
        try:
            return self._installed(rival)
        except NotInstalled as error:
            self._failures[rival] = str(error)
            raise

    def _installed(self, rival: str) -> Environment:
        folder = self._home / HOMES[rival]
        for name in NEEDED[rival]:
            self._install(folder, name)
        libraries = self._libraries() if rival == "mooncake" else []
        known = [*map(str, libraries), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        return Environment(
            folder / "bin" / "python", {"LD_LIBRARY_PATH": os.pathsep.join(known)} if known else {}
        )

    def _install(self, folder: Path, name: str) -> None:
        """Once for each content of the file."""
        pins = REQUIREMENTS / f"{name}.txt"
        mark = folder / f"{name}-{hashlib.sha256(pins.read_bytes()).hexdigest()[:16]}.installed"
        if mark.exists():
            return
        self._home.mkdir(parents=True, exist_ok=True)
        python = folder / "bin" / "python"
        if not python.exists():
            try:
                self._run([sys.executable, "-m", "venv", str(folder)], self._home, TOOL_SECONDS)
            except NotInstalled:
                # Half of one would be taken for a whole one the next time.
                shutil.rmtree(folder, ignore_errors=True)
                raise
        pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
        self._run([*pip, "-r", str(pins)], self._home, INSTALL_SECONDS)
        mark.touch()

    def _libraries(self) -> list[Path]:
        """Folders with the library that Mooncake links against, where the system has none: unpacked beside the environment
        from Debian's packages, and installed nowhere."""
        if loadable(IBVERBS):
            return []
        place = self._home / "libraries"
        folders = [place / folder for folder in LIBRARY_FOLDERS]
        if not any((folder / IBVERBS).exists() for folder in folders):
            place.mkdir(parents=True, exist_ok=True)
            try:
                for package in IBVERBS_PACKAGES:
                    self._run(
                        ["dpkg-deb", "-x", str(self._package(package)), str(place)], place, TOOL_SECONDS
                    )
            except NotInstalled as error:
                raise NotInstalled(f"it needs {IBVERBS} ({IBVERBS_PACKAGES[0]}): {error}") from error
        return [folder for folder in folders if folder.exists()]

    def _package(self, name: str) -> Path:
        """Its file: as apt keeps it, or fetched."""
        for folder in (ARCHIVES, self._home):
            if found := sorted(folder.glob(f"{name}_*.deb")):
                return found[-1]
        self._run(["apt-get", "download", name], self._home, TOOL_SECONDS)
        return sorted(self._home.glob(f"{name}_*.deb"))[-1]


def loadable(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True
