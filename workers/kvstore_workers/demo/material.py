"""Where the session's text comes from: the files given, or the Python standard library's own sources."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvstore.errors import ConfigError

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


def excerpts(paths: Sequence[Path], *, length: int) -> Iterator[tuple[str, str]]:
    """(name, text) without end: pieces of `length` characters, a file after the other, round and round."""
    while True:
        for path in paths:
            text = _read(path)
            for start in range(0, len(text), length):
                yield f"{path.name}:{start}", text[start : start + length]


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(
            f"cannot read: {error.strerror}", field="--files", value=path, allowed="readable text files"
        ) from error
    if not text:
        raise ConfigError("an empty file", field="--files", value=path, allowed="files with text in them")
    return text
