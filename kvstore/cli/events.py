"""`kvstore events`: print what a store, or an engine, tells routers."""

from __future__ import annotations

import argparse
import json
from typing import Any

from kvstore.events.base import AllBlocksCleared, Batch, BlockRemoved, BlockStored, Event, UnknownEvent
from kvstore.events.wire import event_value
from kvstore.units import parse_count, parse_time

DEFAULT_ENDPOINT = "tcp://127.0.0.1:5557"


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = (
        "print the KV events of a store that was started with --events, or of a vLLM engine; Ctrl-C ends it"
    )
    parser = subparsers.add_parser("events", help=about, description=about)
    parser.add_argument(
        "endpoint",
        nargs="?",
        default=DEFAULT_ENDPOINT,
        help=f"where events are sent (default {DEFAULT_ENDPOINT})",
    )
    parser.add_argument(
        "--replay",
        metavar="ENDPOINT",
        help="where they are sent again: gaps are closed, and it begins with all that is held",
    )
    parser.add_argument("--batches", metavar="COUNT", help="end after so many batches")
    parser.add_argument("--quiet", metavar="TIME", help="end when nothing has come for so long")
    parser.add_argument(
        "--json", action="store_true", help="one JSON object a line: keys and digests in hexadecimal"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    most = None if args.batches is None else parse_count(args.batches, name="--batches")
    quiet = None if args.quiet is None else parse_time(args.quiet, name="--quiet")
    # Here, so that the other commands do not need its packages.
    from kvstore_client.events import EventReader

    with EventReader(args.endpoint, replay=args.replay) as reader:
        count = 0
        while most is None or count < most:
            batch = reader.read(timeout=3600.0 if quiet is None else quiet)
            if batch is None:
                if quiet is None:
                    continue
                return 0
            count += 1
            for line in _lines(batch, as_json=args.json):
                print(line, flush=True)
    return 0


def _lines(batch: Batch, *, as_json: bool) -> list[str]:
    if as_json:
        return [
            json.dumps(
                {
                    "sequence": batch.sequence,
                    "ts": batch.ts,
                    "missed": batch.missed,
                    **_plain(event_value(event)),
                }
            )
            for event in batch.events
        ]
    gap = [f"{batch.sequence}: {batch.missed} batches before it were lost"] if batch.missed else []
    return gap + [f"{batch.sequence}: {_text(event)}" for event in batch.events]


def _text(event: Event) -> str:
    """For people: what, how much, and the last block's key, shortened."""
    match event:
        case BlockStored() | BlockRemoved():
            verb = "stored" if isinstance(event, BlockStored) else "removed"
            last = (event.block_keys or event.block_hashes)[-1:]
            return f"{len(event.block_hashes)} blocks {verb}, to {_short(last)}{_of(event.namespace)} ({event.medium})"
        case AllBlocksCleared():
            return f"all cleared{_of(event.namespace)}"
        case UnknownEvent():
            return f"{event.type}, which is not known here"
    fields = event_value(event)
    tokens = f", restorable to {fields['restorable_tokens']} tokens" if "restorable_tokens" in fields else ""
    verb = "stored" if tokens else "removed"
    return f"state {verb} from {event.source}{tokens}, at {_short((event.block_key,))}{_of(event.namespace)} ({event.medium})"


def _of(namespace: bytes | None) -> str:
    return "" if namespace is None else f" of {namespace.hex()[:12]}"


def _short(last: tuple[Any, ...]) -> str:
    if not last:
        return "none"
    return last[0].hex()[:12] if isinstance(last[0], bytes) else str(last[0])


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
