"""`kvstore simulate --live`: the log against a running service too, and whether it does what was simulated."""

from __future__ import annotations

import argparse
import math
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvstore.cli.output import emit, table
from kvstore.cli.simulate_report import about_lines
from kvstore.cli.stopping import Check, stoppable
from kvstore.clock import SystemClock
from kvstore.errors import InvalidArgument
from kvstore.policy.admission import Admission
from kvstore.profile.base import Profile
from kvstore.profile.registry import get_profile
from kvstore.simulate.case import Replay, TtlFrom
from kvstore.simulate.formats import LoadedLog
from kvstore.simulate.live import (
    DIFFERENCE_MAX,
    Drive,
    LiveOutcome,
    Simulated,
    namespace_name,
    simulate_alike,
)
from kvstore.simulate.sizes import ALL
from kvstore.simulate.study import Question, Study, facts
from kvstore.units import rounded
from kvstore_client import CacheClient

DEFAULT_PROFILE = "tiny"
"""Whose blocks are the smallest."""

_LEFT_OUT = {
    "policy": "",
    "size": "",
    "ttl": "",
    "ttl_from": TtlFrom.USE.value,
    "windows": "",
    "replay": Replay.NONE.value,
    "admit": Admission.ALWAYS.value,
    "endurance": None,
    "segment": None,
    "html": None,
    "png": None,
}
"""What a service decides itself, or what is drawn of many cases, and how it looks where nobody asks for it."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--live",
        metavar="S",
        help="send the log to a running service (its kvstore.sock or directory), compare with what is simulated in as much room "
        f"under its policy, and fail past {DIFFERENCE_MAX} points; a block of the log is one of --profile "
        f"(default then {DEFAULT_PROFILE})",
    )
    parser.add_argument(
        "--warp",
        metavar="N",
        help="with --live: time passes N times as fast as in the log (default: one request after another)",
    )


def check(args: argparse.Namespace) -> None:
    """Refuse what does not go together."""
    if args.live is None:
        if args.warp is not None:
            raise InvalidArgument(
                "time passes in a running service only",
                field="--warp",
                value=args.warp,
                allowed="--live S with it",
            )
        return
    for name, default in _LEFT_OUT.items():
        if getattr(args, name) != default:
            raise InvalidArgument(
                "with --live the service decides, and there is one case",
                field=f"--{name.replace('_', '-')}",
                value=getattr(args, name),
                allowed="none beside --live",
            )
    if "://" in args.live:
        raise InvalidArgument(
            "figures are told, and what was stored is cleared, on the service's own machine only",
            field="--live",
            value=args.live,
            allowed="a running service's kvstore.sock, or its directory",
        )


def run(args: argparse.Namespace, load: Callable[[], LoadedLog]) -> int:
    profile = get_profile(args.profile or DEFAULT_PROFILE)
    warp = None if args.warp is None else _warp(args.warp)
    path = Path(args.live)
    directory = path.parent if path.suffix == ".sock" else path

    def work(check: Check) -> tuple[LoadedLog, LiveOutcome, Simulated]:
        with CacheClient(directory, owner="kvstore-simulate") as client:
            client.stats()  # before a long log is read
            loaded = load()
            drive = Drive(
                client,
                loaded.log,
                profile,
                as_served=args.as_served,
                seed=secrets.randbits(64),
                clock=SystemClock(),
                warp=warp,
                tell=_tell,
            )
            try:
                live = drive.run(check)
            finally:
                _tell("")
        return loaded, live, simulate_alike(loaded.log, live, as_served=args.as_served, check=check)

    name = namespace_name(profile)
    loaded, live, simulated = stoppable(
        work,
        leaves=f"blocks may be left in namespace {name}: clear it with `kvstore clear --namespace {name}`",
    )
    study = Study(loaded, Question(policies=[live.policy], sizes=[ALL], as_served=args.as_served))
    answer = {
        "log": facts(study),
        "live": {"address": args.live, "warp": warp, **values(live, simulated, profile)},
    }
    emit(args, answer, text(answer))
    return 1 if answer["live"]["failed"] else 0


def values(live: LiveOutcome, simulated: Simulated, profile: Profile) -> dict[str, Any]:
    """Rates in percent, differences in points. `steady`: with the most blocks that the service held, all the time."""
    rate, alike, steady = (each.token_hit_rate for each in (live, simulated.alike, simulated.steady))
    difference = rate - alike
    failed = [
        name
        for name, is_so in (
            ("difference", abs(difference) > DIFFERENCE_MAX),
            ("wrong_bytes", live.wrong_bytes > 0),
            ("missing_blocks", live.missing_blocks > 0),
        )
        if is_so
    ]
    return {
        "failed": failed,
        "token_hit_rate": rate,
        "simulated_token_hit_rate": alike,
        "difference": difference,
        "difference_allowed": DIFFERENCE_MAX,
        "steady_token_hit_rate": steady,
        "policy": live.policy,
        "namespace": namespace_name(profile),
        "profile": profile.name,
        "block_bytes": profile.block_bytes,
        "requests": live.requests,
        "seconds": live.seconds,
        "late_seconds_most": live.late_seconds_most,
        "input_tokens": live.input_tokens,
        "hit_tokens": live.hit_tokens,
        "blocks_asked": live.blocks_asked,
        "blocks_hit": live.blocks_hit,
        "blocks_stored": live.blocks_stored,
        "simulated_blocks_stored": simulated.alike.blocks_stored,
        "blocks_refused": live.blocks_refused,
        "evicted_blocks": live.blocks_left,
        "blocks_held": live.blocks_held,
        "blocks_held_most": max(live.held_after(), default=0),
        "fetched_blocks": live.fetched_blocks,
        "missing_blocks": live.missing_blocks,
        "wrong_bytes": live.wrong_bytes,
        "others_blocks": live.before.blocks,
        "others_stored_blocks": live.others_stored,
        "others_evicted_blocks": live.others_left,
    }


def text(answer: dict[str, Any]) -> str:
    live = answer["live"]
    rows = [
        ("live", live["token_hit_rate"], live["blocks_stored"]),
        ("simulated", live["simulated_token_hit_rate"], live["simulated_blocks_stored"]),
    ]
    lines = [
        *about_lines(answer["log"]),
        f"service at {live['address']}: {live['policy']}, {live['requests']:,} requests in {live['seconds']:.1f} s, blocks of "
        f"{live['profile']} ({rounded(live['block_bytes'])})",
        "",
        table(
            [(name, f"{rate:.2f} %", f"{stored:,}") for name, rate, stored in rows],
            head=("", "hit rate", "stored"),
        ),
        "",
        f"difference {live['difference']:+.2f} points (at most {live['difference_allowed']} allowed"
        f"{', FAILED' if 'difference' in live['failed'] else ''})",
        f"{live['fetched_blocks']:,} blocks fetched: {live['wrong_bytes']:,} wrong bytes, {live['missing_blocks']:,} missing",
    ]
    if live["evicted_blocks"]:
        lines.append(
            f"{live['evicted_blocks']:,} blocks evicted; at most {live['blocks_held_most']:,} held, "
            f"{live['steady_token_hit_rate']:.2f} % if so many had been held all the time"
        )
    if live["blocks_refused"]:
        lines.append(f"{live['blocks_refused']:,} blocks refused for want of room")
    if live["others_blocks"] or live["others_stored_blocks"]:
        lines.append(
            f"others held {live['others_blocks']:,} blocks before, and stored {live['others_stored_blocks']:,} meanwhile"
        )
    if live["others_evicted_blocks"]:
        lines.append(
            f"{live['others_evicted_blocks']:,} of theirs left; the simulation takes them to have gone first, as under lru"
        )
    return "\n".join(lines)


def _warp(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1e9:
        raise InvalidArgument("not a speed", field="--warp", value=text, allowed="more than 0, up to 1e9")
    return value


def _tell(line: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{line}")
        sys.stderr.flush()
