"""The command `kvstore`: parse, call, print. Exit code 0 only for success; errors are one line on stderr."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import sys
from typing import Any

from kvstore.errors import KvstoreError

# Modules that register commands: the commands, and the packages that must be there for them.
_MODULES: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("kvstore.cli.serve", ("serve",), ("lmdb", "msgpack", "prometheus_client", "grpc_health")),
    ("kvstore_workers.demo.command", ("demo",), ("torch", "lmdb")),
    ("kvstore_workers.cli", ("worker", "gateway"), ("torch",)),
    ("kvstore.cli.profiles", ("profiles",), ()),
    ("kvstore.cli.bench", ("bench",), ("lmdb", "numpy")),
    ("kvstore.cli.plan", ("plan",), ()),
    ("kvstore.cli.simulate", ("simulate",), ("lmdb", "numpy")),
    ("kvstore.cli.chaos", ("chaos",), ("lmdb", "xxhash")),
    ("kvstore.cli.admin", ("stats", "clear", "drain", "memory", "policy", "tenants"), ()),
    ("kvstore.cli.top", ("top",), ()),
    ("kvstore.cli.events", ("events",), ("zmq", "msgpack")),
    ("kvstore.cli.disk", ("verify", "rebuild-index"), ("lmdb", "numpy")),
)

_EXTRAS = {"zmq": "events", "torch": "workers"}
"""Which extra brings a package; the others come with `service`."""

EXIT_CODES = (
    "Exit codes: 0 success; 1 failed or refused (a value that is not allowed, too), damage or violations found, a bar missed; "
    "2 a command line that does not parse; 130 interrupted; 141 the reader of the output went away."
)


class _CommandParser(argparse.ArgumentParser):
    """What a command does not know it says itself, with its own usage; by itself argparse lets the top one say it."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """`command`: the only one that is wanted, so that the others' modules need not be imported; None, or one that is not
    known: all."""
    parser = argparse.ArgumentParser(prog="kvstore", description="Prefix store for hybrid-attention LLMs.")
    parser.add_argument(
        "--version", action="version", version=f"kvstore {importlib.metadata.version('kvstore')}"
    )
    subparsers = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=_CommandParser
    )
    there, left_out = [], []
    for module, commands, needs in _MODULES:
        missing = [name for name in needs if importlib.util.find_spec(name) is None]
        if missing:
            extra = next((_EXTRAS[name] for name in missing if name in _EXTRAS), "service")
            left_out.append(f"{', '.join(commands)} (needs {', '.join(missing)}: install kvstore[{extra}])")
        else:
            there.append((module, commands))
    for module, _ in [entry for entry in there if command in entry[1]] or there:
        importlib.import_module(module).register(subparsers)
    parser.epilog = EXIT_CODES
    if left_out:
        parser.epilog += f" NOT AVAILABLE in this environment: {'; '.join(left_out)}."
    return parser


def main(argv: list[str] | None = None) -> int:
    try:
        words = sys.argv[1:] if argv is None else argv
        parser = build_parser(words[0] if words else None)
        args = parser.parse_args(words, argparse.Namespace(words=words))
        code: int = args.run(args)
        # Here, so that a full disk behind the answer is an error and not a warning at the interpreter's end.
        sys.stdout.flush()
    except KvstoreError as error:
        print(f"kvstore: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("kvstore: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output went away, as `head` does; nothing is left to say to it.
        sys.stderr.close()
        return 141
    except OSError as error:
        print(f"kvstore: the system refused: {error}", file=sys.stderr)
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
