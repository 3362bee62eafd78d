"""`kvstore top`: what a service does, looked at again and again."""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kvstore.cli.connect import add_directory_flag, add_remote_flags, connect
from kvstore.cli.output import add_json_flag, check_json_target, emit
from kvstore.cli.top_view import rates, view
from kvstore.errors import InvalidArgument, KvstoreError, Unavailable
from kvstore.units import parse_time

EVERY_SECONDS_MIN, EVERY_SECONDS_MAX = 0.1, 3600.0
ANSWER_SECONDS = 5.0
ANSWER_BYTES_MAX = 4 << 20

# Another screen, from its top on, without a cursor; and back.
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
TOP, END_OF_LINE, END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"

UNKNOWN_SIZE = (80, 24)
"""Of a terminal that does not say."""

Look = Callable[[], Mapping[str, Any]]
"""A status: `figures`, and where they are known `plans` and `slowest_calls`."""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "watch a running service: tiers, hits, rates, plans, retention; Ctrl-C ends it"
    parser = subparsers.add_parser("top", help=about, description=about)
    add_directory_flag(parser)
    add_remote_flags(parser)
    parser.add_argument(
        "--metrics",
        metavar="HOST:PORT",
        help="ask the service's --metrics port instead, also on another machine; it knows plans and slow calls",
    )
    parser.add_argument("--every", metavar="TIME", default="2s", help="how often to look (default 2s)")
    parser.add_argument(
        "--once", action="store_true", help="look twice, --every apart, and print once; so it does in a pipe"
    )
    add_json_flag(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    check_json_target(args)
    every = parse_time(args.every, name="--every")
    if not EVERY_SECONDS_MIN <= every <= EVERY_SECONDS_MAX:
        raise InvalidArgument(
            "out of range",
            field="--every",
            value=args.every,
            allowed=f"{EVERY_SECONDS_MIN:g} s to {EVERY_SECONDS_MAX:g} s",
        )
    is_watched = sys.stdout.isatty() and not args.once and args.json is None
    with _looking(args) as look:
        if is_watched:
            _watch(look, every)
            return 0
        before = look()
        threading.Event().wait(every)
        now = look()
    values = rates(now["figures"], before["figures"])
    emit(args, {**now, "rates": values}, "\n".join(view(now, values)))
    return 0


def _watch(look: Look, every: float) -> None:
    """Until Ctrl-C. A service that does not answer is said so, and asked again."""
    before: Mapping[str, Any] | None = None
    sys.stdout.write(ENTER)
    try:
        while True:
            try:
                now = look()
                lines = view(now, rates(now["figures"], before["figures"] if before else None))
                before = now
            except KvstoreError as error:
                before = None
                lines = [f"no answer: {error}", f"asked again every {every:g} s"]
            # What does not fit is left out: a line that goes on in the next one would move all below it.
            size = os.get_terminal_size(sys.stdout.fileno())
            columns, rows = size if all(size) else UNKNOWN_SIZE
            drawn = "".join(f"{line[:columns]}{END_OF_LINE}\n" for line in lines[: rows - 1])
            sys.stdout.write(TOP + drawn + END_OF_SCREEN)
            sys.stdout.flush()
            threading.Event().wait(every)
    except KeyboardInterrupt:
        return
    finally:
        sys.stdout.write(LEAVE)
        sys.stdout.flush()


@contextmanager
def _looking(args: argparse.Namespace) -> Iterator[Look]:
    if args.metrics:
        yield lambda: _ask_page(args.metrics)
        return
    with connect(args) as client:
        yield lambda: {"figures": client.stats()}


def _ask_page(address: str) -> Mapping[str, Any]:
    url = f"http://{address}/status.json"
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_SECONDS) as answer:  # the scheme is ours
            status = json.loads(answer.read(ANSWER_BYTES_MAX))
    except (OSError, urllib.error.URLError, ValueError) as error:
        raise Unavailable(
            f"no status there: {getattr(error, 'reason', error)}",
            field="--metrics",
            value=address,
            allowed="the HOST:PORT that `kvstore serve --metrics` has",
        ) from error
    if not isinstance(status, dict) or not isinstance(status.get("figures"), dict):
        raise Unavailable("no kvstore answers there", field="--metrics", value=address)
    return status
