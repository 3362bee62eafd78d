"""The commands `worker` and `gateway`. Torch is imported when one of them runs, not when they are listed."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable

from kvstore.config import prefer_environment
from kvstore.errors import KvstoreError

SECONDS_MAX = 86_400.0


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `worker` and `gateway`; each sets `run`, a callable from the parsed arguments to the exit code."""
    _add_worker(subparsers)
    _add_gateway(subparsers)


def _add_worker(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("worker", help="run a prefill or a decode worker")
    parser.add_argument("role", choices=("prefill", "decode"), help="what this worker does")
    parser.add_argument("--listen", required=True, metavar="unix:PATH", help="the socket to serve on")
    parser.add_argument(
        "--cache",
        type=_path,
        default=None,
        metavar="DIR",
        help="the cache service's directory, or tcp://HOST:PORT; without it nothing is stored",
    )
    parser.add_argument(
        "--cache-token-file",
        type=_path,
        default=None,
        metavar="FILE",
        help="what lets this worker in to a service over TCP",
    )
    parser.add_argument(
        "--cache-ca",
        type=_path,
        default=None,
        metavar="FILE",
        help="PEM file of the certificates that the service's must come from (default: the system's)",
    )
    for name, what in (("cert", "certificate, with its chain"), ("key", "certificate's key")):
        parser.add_argument(
            f"--cache-{name}",
            type=_path,
            default=None,
            metavar="FILE",
            help=f"PEM file of this worker's own {what}, for a service that asks for one",
        )
    parser.add_argument(
        "--cache-insecure",
        action="store_true",
        help="no TLS to a service over TCP: whoever is on the way reads and changes everything",
    )
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument("--seed", type=_count, default=0, help="random weights from this seed (default 0)")
    weights.add_argument(
        "--checkpoint",
        type=_path,
        default=None,
        metavar="FOLDER",
        help="weights from a checkpoint folder",
    )
    parser.add_argument(
        "--profile", default="tiny", help="the model's profile where weights are random (default tiny)"
    )
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda or cuda:N")
    parser.add_argument("--dtype", default="float32", help="float32 (default) or bfloat16")
    parser.add_argument(
        "--threads", type=_count, default=0, help="threads for computing; 0 (default): torch's choice"
    )
    parser.add_argument(
        "--namespace",
        default="",
        metavar="NAME",
        help="the namespace's label; made from its identity by default",
    )
    parser.add_argument(
        "--tenant-salt", default="", metavar="S", help="keeps this tenant's bytes apart from all others'"
    )
    parser.add_argument(
        "--policy",
        default="",
        help="window-state policy if the namespace is new: zero, endpoints, periodic:N, full or full+overlap",
    )
    parser.add_argument(
        "--requests", type=_positive, default=64, help="requests that may run or wait (default 64)"
    )
    _add_grace(parser)
    parser.set_defaults(run=_run_worker)


def _add_gateway(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("gateway", help="run a gateway in front of prefill and decode workers")
    parser.add_argument("--listen", required=True, metavar="unix:PATH", help="the socket to serve on")
    for role in ("prefill", "decode"):
        parser.add_argument(
            f"--{role}",
            action="append",
            required=True,
            metavar="unix:PATH",
            help=f"a {role} worker's socket; once for each of them",
        )
    parser.add_argument(
        "--requests",
        type=_positive,
        default=64,
        help="requests in the gateway, those that wait included (default 64)",
    )
    parser.add_argument(
        "--per-worker", type=_positive, default=4, help="requests on each worker at once (default 4)"
    )
    parser.add_argument(
        "--queue", type=_count, default=32, help="new requests that may wait for a worker (default 32)"
    )
    parser.add_argument(
        "--queue-seconds", type=_seconds, default=30.0, help="how long each of them may wait (default 30)"
    )
    parser.add_argument(
        "--slack",
        type=_count,
        default=0,
        help="how many more requests than the least loaded prefill worker the one that last had a prompt's beginning may "
        "have and still get it (default 0)",
    )
    _add_grace(parser)
    parser.set_defaults(run=_run_gateway)


def _add_grace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--grace",
        type=_seconds,
        default=10.0,
        metavar="SECONDS",
        help="how long requests under way may go on after SIGTERM (default 10)",
    )


def _run_worker(args: argparse.Namespace) -> int:
    def serve() -> None:
        from kvstore_workers.runtime.options import WorkerOptions, check_options

        options = WorkerOptions(
            role=args.role,
            listen=args.listen,
            cache=args.cache or "",
            cache_token_file=args.cache_token_file,
            cache_ca=args.cache_ca,
            cache_cert=args.cache_cert,
            cache_key=args.cache_key,
            cache_insecure=args.cache_insecure,
            profile=args.profile,
            seed=args.seed,
            checkpoint=args.checkpoint or "",
            device=args.device,
            dtype=args.dtype,
            threads=args.threads,
            namespace=args.namespace,
            tenant_salt=args.tenant_salt,
            policy=args.policy,
            requests=args.requests,
            grace=args.grace,
        )
        # Before torch is imported, so that a slip is answered at once.
        check_options(options)
        # Read when torch is loaded. By default its threads wait for each other by spinning, which makes two workers that
        # share their cores dozens of times slower than one.
        prefer_environment("OMP_WAIT_POLICY", "PASSIVE")
        from kvstore_workers.runtime.process import serve_worker

        serve_worker(options)

    return _exit_code(serve, f"kvstore worker {args.role}")


def _run_gateway(args: argparse.Namespace) -> int:
    def serve() -> None:
        from kvstore_workers.runtime.gateway_process import GatewayOptions, serve_gateway

        serve_gateway(
            GatewayOptions(
                listen=args.listen,
                prefill=tuple(args.prefill),
                decode=tuple(args.decode),
                requests=args.requests,
                per_worker=args.per_worker,
                queue=args.queue,
                queue_seconds=args.queue_seconds,
                slack=args.slack,
                grace=args.grace,
            )
        )

    return _exit_code(serve, "kvstore gateway")


def _exit_code(serve: Callable[[], None], name: str) -> int:
    """0 after an orderly end; 1 with one line on stderr for what the user can mend."""
    logging.basicConfig(
        level=logging.WARNING, format=f"%(asctime)s {name}: %(levelname)s %(message)s", stream=sys.stderr
    )
    try:
        serve()
    except KvstoreError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    return 0


def _path(text: str) -> str:
    # Empty is what an unset variable gives, and would mean random weights, or no store, without a word.
    if not text:
        raise argparse.ArgumentTypeError("an empty path")
    return text


def _count(text: str) -> int:
    return _whole(text, 0, 2**63 - 1)


def _positive(text: str) -> int:
    return _whole(text, 1, 10_000)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    # Also false for what is not a number.
    if not 0.0 <= seconds <= SECONDS_MAX:
        raise argparse.ArgumentTypeError(f"{text}: not a number of seconds from 0 to {SECONDS_MAX:g}")
    return seconds


def _whole(text: str, low: int, high: int) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 20 and low <= int(text) <= high):
        raise argparse.ArgumentTypeError(f"{text}: not a whole number from {low} to {high}")
    return int(text)
