"""`kvstore serve`: run the cache service in the foreground."""

from __future__ import annotations

import argparse
from typing import Any

from kvstore.config import load_service_config, options, unknown_variables


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="run the cache service on a directory",
        description="Run the cache service. Flags go before KVSTORE_* variables, those before --config FILE (TOML). A SIZE is "
        "like 64GiB or 4096, a TIME like 72h, 10m or 500ms, a SHARE a number from 0 to 1.",
    )
    parser.add_argument(
        "--config", metavar="FILE", default=None, help="TOML file with any of the options below"
    )
    for option in options():
        # A flag needs no value on the command line.
        bare: dict[str, Any] = {"nargs": "?", "const": "yes"} if option.kind == "FLAG" else {}
        parser.add_argument(
            f"--{option.name.replace('_', '-')}",
            dest=option.name,
            metavar=option.kind,
            default=None,
            **bare,
            help=f"{option.about}{f' (default {option.default})' if option.default else ''}".replace(
                "%", "%%"
            ),
        )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from kvstore.policy.registry import make_policy
    from kvstore.policy.window import WindowPolicy

    config = load_service_config(
        {option.name: getattr(args, option.name) for option in options()},
        file=args.config,
        checks={
            "policy": lambda value, source: WindowPolicy.check(value, field=source),
            "eviction": lambda value, source: make_policy(value, field=source),
        },
    )
    from kvstore.service.notify import notify_ready
    from kvstore.service.server import main_blocking

    main_blocking(config, ready=notify_ready, unknown=unknown_variables())
    return 0
