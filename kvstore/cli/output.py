"""How commands answer: text for people on stdout, or JSON to stdout or a file; progress on stderr, terminals only."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError

STDOUT = "-"


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        nargs="?",
        const=STDOUT,
        default=None,
        metavar="FILE",
        help="answer as JSON, to FILE or else to stdout",
    )


def check_json_target(args: argparse.Namespace) -> None:
    """Refuse a file that cannot be written before long work, rather than after it."""
    if args.json is not None and args.json != STDOUT:
        _write(args.json, "")


def emit(args: argparse.Namespace, value: Any, text: str) -> None:
    """Print `text`; with --json FILE also write `value` there; with bare --json print `value` instead."""
    if args.json is None:
        print(text)
        return
    document = json.dumps(value, indent=2) + "\n"
    if args.json == STDOUT:
        sys.stdout.write(document)
        return
    print(text)
    _write(args.json, document)


def _write(path: str, document: str) -> None:
    try:
        Path(path).write_text(document, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write the JSON file: {error.strerror}",
            field="--json",
            value=path,
            allowed="a writable path",
        ) from error


def table(rows: Sequence[Sequence[object]], *, head: Sequence[str]) -> str:
    """Columns as wide as their widest cell; numbers to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
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
