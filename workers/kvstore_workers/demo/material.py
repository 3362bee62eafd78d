"""What the session reads: the files given, or the Python standard library's own sources. Bytes, since a byte is a token."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvstore.errors import ConfigError

FILE_BYTES_MAX = 1 << 20
"""Read of one file: no session is longer than that."""

# Long-lived modules of different style; any that this Python lacks is left out.
_STANDARD = (
    "heapq.py",
    "textwrap.py",
    "bisect.py",
    "queue.py",
    "shlex.py",
    "sched.py",
    "graphlib.py",
    "calendar.py",
    "csv.py",
)


def choose_files(given: Sequence[str]) -> list[Path]:
    """The files to read, each readable and not empty; ConfigError names the first that is not."""
    if given:
        paths = [Path(name) for name in given]
        for path in paths:
            _read(path)
        return paths
    folder = Path(sysconfig.get_path("stdlib"))
    paths = [folder / name for name in _STANDARD if (folder / name).is_file()]
    if not paths:
        raise ConfigError(
            "this Python has no library sources to read",
            field="--files",
            value=folder,
            allowed="name files with --files",
        )
    return paths


def excerpts(paths: Sequence[Path], *, length: int) -> Iterator[tuple[str, bytes]]:
    """(name, content) without end: pieces of `length` bytes, a file after the other, round and round."""
    while True:
        for path in paths:
            content = _read(path)
            for start in range(0, len(content), length):
                yield f"{path.name}:{start}", content[start : start + length]


def _read(path: Path) -> bytes:
    try:
        if path.exists() and not path.is_file():
            # A pipe can't be read twice, and some devices never end.
            raise ConfigError(
                "not a file", field="--files", value=path, allowed="regular files with text in them"
            )
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read: {getattr(error, 'strerror', None) or error}",
            field="--files",
            value=path,
            allowed="readable text files",
        ) from error
    if not content:
        raise ConfigError("an empty file", field="--files", value=path, allowed="files with text in them")
    return content
