"""Memory: what this process may use, and how one number is shared out among what needs some."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from kvstore.errors import ConfigError
from kvstore.units import rounded

POINTS = {"pool": 18, "handoff": 2, "cache": 20, "arenas": 4, "staging": 4, "fetch": 2}
"""How the budget is shared out. Handoffs are states in host memory, and come out of the pool's share."""

MEMORY_SHARE = 4
"""The budget is this part of what there is."""

FETCH_BYTES_MIN, FETCH_BYTES_MAX = 4 << 20, 256 << 20
"""Two reads of one fetch; more than this is not read ahead of who takes it."""

_NO_LIMIT = 1 << 60
"""Version 1 says no limit by a number above it."""


@dataclass(frozen=True, slots=True)
class Available:
    """Memory that this process may use. `because`: what limits it, for people."""

    bytes: int
    because: str


@dataclass(frozen=True, slots=True)
class Parts:
    """Bytes of each part of `memory`. `fetch`: of payloads on their way out."""

    memory: int
    pool: int
    handoff: int
    cache: int
    arenas: int
    staging: int
    fetch: int

    @property
    def sum(self) -> int:
        return self.pool + self.handoff + self.cache + self.arenas + self.staging + self.fetch


def available(root: Path = Path("/")) -> Available:
    """The lowest limit of this process's own cgroup and those that it lies in, else all of RAM. `root`: where proc and sys
    are."""
    found = Available(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "RAM")
    for path in _limit_files(root):
        try:
            text = path.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
        if text.isdigit() and int(text) < min(found.bytes, _NO_LIMIT):
            found = Available(int(text), f"limit of the cgroup, {path}")
    return found


def _limit_files(root: Path) -> Iterator[Path]:
    """Where limits may be said, of the own cgroup first and the root of all last. Inside a container the path may be the host's,
    of which only the end, or nothing, is to be seen."""
    mount = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = ["0::/", "1:memory:/"]
    bases: tuple[Path, ...]
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers:
            bases, name = (mount, mount / "unified"), "memory.max"
        elif "memory" in controllers.split(","):
            bases, name = (mount / "memory",), "memory.limit_in_bytes"
        else:
            continue
        inner = PurePosixPath(path.lstrip("/"))
        if ".." in inner.parts:
            inner = PurePosixPath()
        for base in bases:
            for folder in (inner, *inner.parents) if inner.parts else (inner,):
                yield base / folder / name


def share_out(memory: int, given: Mapping[str, int], there_is: Available) -> Parts:
    """The parts of a budget: those of `given` that are not 0 as they are, the others by POINTS. `memory` 0: the default.

    ConfigError for what is larger than what there is, and for parts that are more than the budget together."""
    for name, value in {"memory": memory, **given}.items():
        if value > there_is.bytes:
            raise ConfigError(
                "larger than all memory that there is",
                field=f"--{name}",
                value=rounded(value),
                allowed=f"up to {rounded(there_is.bytes)} ({there_is.because})",
            )
    budget = memory or there_is.bytes // MEMORY_SHARE
    points = sum(POINTS.values())
    fetch = budget * POINTS["fetch"] // points
    rest = budget
    if fetch < FETCH_BYTES_MIN and budget >= 2 * FETCH_BYTES_MIN:
        # What a small budget's fetches need beyond their share, the others have less.
        rest, points = budget - FETCH_BYTES_MIN, points - POINTS["fetch"]
    sizes = {name: given.get(name) or rest * share // points for name, share in POINTS.items()}
    sizes["fetch"] = min(max(fetch, FETCH_BYTES_MIN), FETCH_BYTES_MAX)
    parts = Parts(memory=budget, **sizes)
    if parts.sum > budget:
        listed = ", ".join(f"{name} {rounded(value)}" for name, value in sizes.items())
        raise ConfigError(
            f"the parts of memory are more than all of it: {listed}",
            field="--memory",
            value=rounded(budget),
            allowed=f"{rounded(parts.sum)} or more for these; or smaller parts",
        )
    return parts
