"""`kvstore serve`: run the cache service in the foreground."""

from __future__ import annotations

import argparse

from kvstore.config import load_service_config, option_names


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="run the cache service on a directory",
        description="Run the cache service. Flags go before KVSTORE_* variables, those before --config FILE (TOML).",
    )
    parser.add_argument(
        "--config", metavar="FILE", default=None, help="TOML file with any of the options below"
    )
    for name, about in option_names().items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", dest=name, metavar="VALUE", default=None, help=about
        )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config = load_service_config({name: getattr(args, name) for name in option_names()}, file=args.config)
    from kvstore.service.server import main_blocking

    main_blocking(config)
    return 0
