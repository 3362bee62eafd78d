"""How commands answer: text for people on stdout, or JSON to stdout or a file; progress on stderr, terminals only."""

from __future__ import annotations

import argparse
import errno
import json
import os
import secrets
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError, one_line

STDOUT = "-"


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        nargs="?",
        const=STDOUT,
        default=None,
        metavar="FILE",
        type=_json_file,
        help="answer as JSON, to FILE (x.json, or a path with a /) or else to stdout",
    )


def _json_file(name: str) -> str:
    """Refuse what is rather a name meant for the command: `--json` takes what follows it."""
    if name == STDOUT or name.endswith(".json") or "/" in name:
        return name
    raise argparse.ArgumentTypeError(
        f"{name!r} is no FILE, which ends in .json or has a / in it; names come before --json"
    )


def check_json_target(args: argparse.Namespace) -> None:
    """Refuse a file that cannot be written before long work, rather than after it. Changes nothing."""
    if args.json is not None and args.json != STDOUT:
        check_target(args.json, option="--json")


def check_target(path: str, *, option: str) -> None:
    """Refuse a file, the value of `option`, that cannot be written. Changes nothing."""
    with _refused(path, option):
        target = _Target(path)
        target.check()
        if target.is_replaced:
            descriptor, beside = target.beside()
            os.close(descriptor)
            beside.unlink()


def emit(args: argparse.Namespace, value: Any, text: str) -> None:
    """Print `text`; with --json FILE also write `value` there; with bare --json print `value` instead."""
    if args.json is None:
        print(text)
        return
    document = json.dumps(value, indent=2) + "\n"
    if args.json == STDOUT:
        sys.stdout.write(document)
        return
    # At once: FILE may be where this goes, too.
    print(text, flush=True)
    write_document(args.json, document.encode(), option="--json")


class _Target:
    """Where a document goes: in place of a regular file, or into what is none, such as a pipe or /dev/stdout."""

    def __init__(self, name: str) -> None:
        self.path = Path(name)
        self.status: os.stat_result | None = None
        with suppress(FileNotFoundError):
            self.status = self.path.stat()
        is_regular = self.status is None or stat.S_ISREG(self.status.st_mode)
        # What a descriptor leads to is not ours to replace, even when it is a file.
        self.is_stream = not is_regular or _is_descriptor(self.path)
        if not self.is_stream:
            self.path = self.path.resolve()
        self.is_replaced = not self.is_stream and (
            self.status is None
            or (self.status.st_uid == os.geteuid() and os.access(self.path.parent, os.W_OK | os.X_OK))
        )

    def check(self) -> None:
        """OSError when what is there cannot be written. A pipe is not opened: that waits for its reader."""
        if self.status is None:
            return
        if not self.is_stream or stat.S_ISDIR(self.status.st_mode):
            os.close(os.open(self.path, os.O_WRONLY | os.O_CLOEXEC))
        elif not os.access(self.path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    def beside(self) -> tuple[int, Path]:
        """A new empty file in the same folder, open for writing, with the rights of the one that it is to replace."""
        path = self.path.with_name(f".kvstore-{secrets.token_hex(4)}.tmp")
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        if self.status is not None:
            os.fchmod(descriptor, stat.S_IMODE(self.status.st_mode))
        return descriptor, path


def _is_descriptor(path: Path) -> bool:
    """Whether it is one of this process's open files, as /dev/stdout is a link to."""
    names = [path, path.parent / path.readlink()] if path.is_symlink() else [path]
    return any(name.parent.resolve().is_relative_to("/proc") for name in names)


def write_document(path: str, document: bytes, *, option: str) -> None:
    """A regular file holds the old document or the new one, whole, whatever happens meanwhile."""
    with _refused(path, option):
        target = _Target(path)
        if not target.is_replaced:
            with target.path.open("ab" if target.is_stream else "wb") as file:
                file.write(document)
            return
        descriptor, beside = target.beside()
        try:
            with open(descriptor, "wb") as file:
                file.write(document)
                file.flush()
                os.fsync(descriptor)
            beside.replace(target.path)
        except BaseException:
            beside.unlink()
            raise


@contextmanager
def _refused(path: str, option: str) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ConfigError(
            f"cannot write the {option[2:].upper()} file: {error.strerror}",
            field=option,
            value=path,
            allowed="a writable path",
        ) from error


def table(rows: Sequence[Sequence[object]], *, head: Sequence[str]) -> str:
    """Columns as wide as their widest cell; numbers to the right. No cell ends a line or says anything else to a terminal, whatever
    a client has named what it is about."""
    cells = [[one_line(str(cell)) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(head), *cells]) for i in range(len(head))]
    right = [all(_is_number(row[i]) for row in cells) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        return "  ".join(
            c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)
        ).rstrip()

    return "\n".join([line(head), line(["-" * w for w in widths]), *(line(row) for row in cells)])


def _is_number(text: str) -> bool:
    return (
        text.replace(",", "")
        .replace(".", "")
        .replace("%", "")
        .replace("-", "")
        .replace("e", "")
        .strip("x ")
        .isdigit()
    )
