"""Commands that talk to a running service: stats, policy, memory, clear, drain."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import closing

from kvstore.cli.connect import add_directory_flag, add_remote_flags, connect, digits, named
from kvstore.cli.output import add_json_flag, emit, table
from kvstore.errors import InvalidArgument
from kvstore.policy.registry import EVICTION_NAMES
from kvstore.policy.window import POLICY_NAMES, WindowKind
from kvstore.units import parse_size, parse_time
from kvstore_client import CacheClient
from kvstore_client.values import Erased, OpenedNamespace


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    stats = _command(subparsers, "stats", "what the service holds and has done", run_stats)
    stats.add_argument(
        "names", nargs="*", metavar="NAME", help="only figures whose name contains one of these"
    )

    policy = subparsers.add_parser(
        "policy", help="window-state policies of namespaces, and what is evicted first"
    )
    actions = policy.add_subparsers(title="actions", metavar="ACTION", required=True)
    _command(actions, "show", "every namespace with its policy", run_policy_show)
    change = _command(actions, "set", "change a policy; counts from the next request on", run_policy_set)
    change.add_argument("namespace", help="its name, or the beginning of its digest")
    change.add_argument("policy", help=f"one of {POLICY_NAMES}")

    eviction = _command(
        actions,
        "eviction",
        "show, or change until the next start, which blocks go first",
        run_policy_eviction,
    )
    eviction.add_argument("name", nargs="?", default="", metavar="NAME", help=f"one of {EVICTION_NAMES}")

    _command(subparsers, "tenants", "what each tenant holds and may hold", run_tenants)

    clear = _command(
        subparsers,
        "clear",
        "empty a namespace, or only drop its window states; or forget a tenant, whose bytes are overwritten on the disk as well",
        run_clear,
    )
    what = clear.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--namespace", metavar="NAME", help="the namespace to clear: its name, or the beginning of its digest"
    )
    what.add_argument("--all", action="store_true", help="every namespace")
    what.add_argument(
        "--tenant",
        metavar="NAME",
        help="every namespace of the tenant; returns when none of its bytes can be read on the disk any more",
    )
    clear.add_argument(
        "--no-wait",
        action="store_true",
        help="with --tenant: return when it is forgotten; it is overwritten afterwards",
    )
    clear.add_argument(
        "--timeout",
        default="1h",
        help="with --tenant: how long to wait (default 1h); past it the service goes on, and the exit code is 1",
    )
    clear.add_argument(
        "--states", choices=("pool", "ssd", "both"), help="only window states of that tier; blocks stay"
    )

    memory = _command(
        subparsers, "memory", "show or change what the block cache and the pool may take", run_memory
    )
    for part in ("cache", "pool"):
        memory.add_argument(f"--{part}", metavar="SIZE", help=f"bytes for the {part}, until the next start")

    drain = _command(subparsers, "drain", "refuse new work and wait for what is under way", run_drain)
    drain.add_argument("--timeout", default="30s", help="how long to wait (default 30s)")


def _command(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    about: str,
    run: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(name, help=about, description=about)
    add_directory_flag(parser)
    add_remote_flags(parser)
    add_json_flag(parser)
    parser.set_defaults(run=run)
    return parser


def run_stats(args: argparse.Namespace) -> int:
    with connect(args) as client:
        values = client.stats()
        because = client.buffered_because()
    wanted: Sequence[str] = args.names
    shown = {k: v for k, v in sorted(values.items()) if not wanted or any(w in k for w in wanted)}
    if wanted and not shown:
        raise InvalidArgument(
            "no figure has such a name",
            field="NAME",
            value=" ".join(wanted),
            allowed="part of a name that `kvstore stats` shows",
        )
    rows = [(k, f"{v:,.6g}" if v != int(v) else f"{int(v):,}") for k, v in shown.items()]
    text = table(rows, head=("figure", "value"))
    if because and "direct_io" in shown:
        text += f"\nsegments pass through the page cache: {because}"
    emit(args, shown, text)
    return 0


def run_policy_show(args: argparse.Namespace) -> int:
    with connect(args) as client:
        found = client.namespaces()
    names = Counter(ns.name for ns in found)
    rows = [(ns.name, ns.profile_name, ns.policy, _share(ns), digits(ns)) for ns in found]
    emit(
        args,
        {
            # What several tenants call theirs is told apart by what `policy set` takes.
            ns.name if names[ns.name] == 1 else digits(ns): {
                "name": ns.name,
                "profile": ns.profile_name,
                "policy": ns.policy,
                "states_share_tokens": ns.states_share_tokens,
                "states_share_states": ns.states_share_states,
                "policy_too_large": ns.policy_too_large,
                "digest": ns.digest.hex(),
            }
            for ns in found
        },
        table(rows, head=("namespace", "profile", "policy", "share holds", "digest"))
        if rows
        else "no namespace is open yet",
    )
    return 0


def _share(ns: OpenedNamespace) -> str:
    """What the disk's share for states holds at most: states of prompts of any length, or those of so many tokens."""
    if not ns.states_share_tokens:
        return "no states are kept"
    if ns.policy in (WindowKind.ENDPOINTS, WindowKind.ENDPOINTS_ONLY):
        return f"{ns.states_share_states:,} states"
    held = f"the states of {ns.states_share_tokens:,} tokens"
    return f"{held}: TOO FEW for the longest prompt" if ns.policy_too_large else held


def run_policy_set(args: argparse.Namespace) -> int:
    with connect(args) as client:
        changed = client.set_policy(named(client, args.namespace).digest, args.policy)
    held = "no states are kept on SSD"
    if changed.states_share_tokens:
        held = f"the disk's share for states holds {_share(changed)}"
    emit(
        args,
        {
            "namespace": changed.name,
            "policy": changed.policy,
            "states_share_tokens": changed.states_share_tokens,
            "states_share_states": changed.states_share_states,
        },
        f"{changed.name}: {changed.policy}; {held}",
    )
    return 0


def run_policy_eviction(args: argparse.Namespace) -> int:
    with connect(args) as client:
        now = client.set_eviction(args.name)
    emit(
        args,
        {"eviction": now.policy, "policies": list(now.policies)},
        f"{now.policy} (of {', '.join(now.policies)})",
    )
    return 0


def run_tenants(args: argparse.Namespace) -> int:
    with connect(args) as client:
        found = sorted(client.tenants())
    rows = [
        (
            each.tenant or "(none)",
            f"{each.namespaces:,}",
            f"{each.held_bytes:,}",
            f"{each.promised_bytes:,}",
            "-" if each.quota is None else f"{each.quota:,}",
            f"{each.in_flight_bytes:,}",
            "being erased" if each.erasing else "",
        )
        for each in found
    ]
    head = ("tenant", "namespaces", "held, bytes", "being written", "quota", "in flight", "")
    emit(
        args,
        {each.tenant: each._asdict() for each in found},
        table(rows, head=head) if rows else "no namespace is open yet",
    )
    return 0


def run_clear(args: argparse.Namespace) -> int:
    if args.tenant is not None:
        return _erase(args)
    if args.no_wait:
        raise InvalidArgument(
            "only a tenant's bytes are overwritten", field="--no-wait", value="given", allowed="with --tenant"
        )
    with connect(args) as client:
        digest = b"" if args.all else named(client, args.namespace).digest
        if args.states:
            dropped, kept = client.drop_states(digest, tier=args.states)
            emit(
                args,
                {"dropped": dropped, "kept_leased": kept},
                f"dropped {dropped} states, left {kept} that are leased",
            )
        else:
            blocks, states = client.clear(digest)
            emit(args, {"blocks": blocks, "states": states}, f"cleared {blocks} blocks and {states} states")
    return 0


def _erase(args: argparse.Namespace) -> int:
    if args.states:
        raise InvalidArgument(
            "a tenant is cleared whole", field="--states", value=args.states, allowed="without --tenant"
        )
    now = None
    with connect(args) as client, closing(_progress(client, args)) as steps:
        for now in steps:
            if args.no_wait and not now.done:
                break
    assert now is not None, "a service says when it is forgotten"
    cleared = f"cleared {now.blocks:,} blocks and {now.states:,} states"
    if now.done:
        text = f"{cleared}; {now.overwritten_bytes:,} bytes were overwritten, nothing of the tenant is left on the disk"
    else:
        text = f"{cleared}; {now.files_left} files are still to be overwritten (kvstore tenants says when it is over)"
    emit(args, now._asdict(), text)
    return 0 if now.done or args.no_wait else 1


def _progress(client: CacheClient, args: argparse.Namespace) -> Generator[Erased, None, None]:
    """Shown on a terminal, and nowhere else. It ends early where the time is over."""
    limit = parse_time(args.timeout, name="--timeout")
    shown, end = sys.stderr.isatty(), time.monotonic() + limit
    try:
        for now in client.erase_tenant(args.tenant, timeout=limit + 5):
            if shown:
                print(
                    f"\r{now.files_left} files left, {now.overwritten_bytes:,} bytes overwritten\x1b[K",
                    end="",
                    file=sys.stderr,
                )
            yield now
            if time.monotonic() > end:
                return
    finally:
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr)


def run_memory(args: argparse.Namespace) -> int:
    sizes = {
        part: None if text is None else parse_size(text, name=f"--{part}")
        for part, text in (("cache", args.cache), ("pool", args.pool))
    }
    with connect(args) as client:
        now = client.set_memory(**sizes)
    rows = [
        ("block cache", f"{now.cache_budget:,}", f"{now.cache_allocated:,}"),
        ("pool", f"{now.pool_budget:,}", f"{now.pool_held:,}"),
    ]
    emit(args, now._asdict(), table(rows, head=("memory", "may take", "has, bytes")))
    return 0


def run_drain(args: argparse.Namespace) -> int:
    with connect(args) as client:
        left = client.drain(parse_time(args.timeout, name="--timeout"))
    emit(
        args,
        {"left_open": left},
        "drained" if not left else f"{left} leases, reservations or takes are still open",
    )
    return 0 if not left else 1
