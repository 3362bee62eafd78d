"""Rows of the vLLM tier that the service moves by itself, through shared memory, and as bytes through a socket: rounds in one run.

    python benchmarks/engines/rows.py [--pairs N] [--rows N] [--cold] [--json [FILE]]

The tier's own helper threads move rows of 1 MiB between an engine's pool, which is this process's memory, and one service. Straight: the
pool is a file, and the service reads stores from it and writes loads to it. Shared: a tier whose session has an arena and mapped
memory, with one copy by the tier. Socket: a tier on a loopback connection (without TLS). Beside rows a second: the processor time that
the engine's process spends on a row, which its scheduler would have had. No engine is needed.
"""

from __future__ import annotations

import argparse
import mmap
import os
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "clients")]

from kvstore.bench.pairs import PAIRS, spread  # noqa: E402
from kvstore.cli.output import add_json_flag, check_json_target, emit, table  # noqa: E402
from kvstore.clock import SystemClock  # noqa: E402
from kvstore.prefix.identity import NamespaceIdentity  # noqa: E402
from kvstore.profile.keyed import KeyedProfile  # noqa: E402
from kvstore_client import CacheClient, Dock, KeyedStore  # noqa: E402
from kvstore_vllm.rows import RowTier  # noqa: E402
from kvstore_vllm.settings import TierSettings  # noqa: E402
from tests.support.remote import port_of  # noqa: E402
from tests.support.service import ServiceProcess  # noqa: E402

ROW_BYTES = 1 << 20
STEP_SECONDS = 0.001


class Rows:
    """One tier over a pool of `count` rows, driven as a scheduler would: a job is submitted, and its end is waited for."""

    def __init__(self, address: str, count: int, *, straight: bool) -> None:
        self._count = count
        # As engines make their pools; who is not to be straight is only not told of the file.
        descriptor = os.memfd_create("pool")
        os.ftruncate(descriptor, count * ROW_BYTES)
        self._pool = mmap.mmap(descriptor, count * ROW_BYTES)
        os.close(descriptor)
        self._pool[:] = secrets.token_bytes(ROW_BYTES) * count
        self._dock = Dock.behind(memoryview(self._pool)) if straight else None
        self.seconds_per_row = 0.0
        """Of the last job: of this process's processor time."""
        self._client = CacheClient(address, owner="bench", insecure=address.startswith("tcp:"))
        profile = KeyedProfile(name="rows", payload_bytes=ROW_BYTES)
        identity = NamespaceIdentity(profile=profile, weights_revision="1", numerics="bench")
        self._tier = RowTier(
            KeyedStore(self._client, identity, name="rows", dock=self._dock),
            memoryview(self._pool),
            row_bytes=ROW_BYTES,
            settings=TierSettings(address=address),
            clock=SystemClock(),
            close=self._client.close,
        )
        self._number = 0
        self._pause = threading.Event()
        self._keys: list[bytes] = []

    def close(self) -> None:
        self._tier.shutdown()
        if self._dock is not None:
            self._dock.close()

    def store(self) -> float:
        """Rows a second, durable."""
        self._keys = [secrets.token_bytes(32) for _ in range(self._count)]
        return self._run(is_load=False)

    def load(self) -> float:
        """Rows a second, checked against their writer's sums, of what was stored last."""
        return self._run(is_load=True)

    def _run(self, *, is_load: bool) -> float:
        self._number += 1
        begin, spent = time.perf_counter(), time.process_time()
        (self._tier.load if is_load else self._tier.store)(self._number, self._keys, list(range(self._count)))
        while not (finished := self._tier.finished()):
            # An engine's step, which computes elsewhere meanwhile.
            self._pause.wait(STEP_SECONDS)
        taken = time.perf_counter() - begin
        self.seconds_per_row = (time.process_time() - spent) / self._count
        [done] = finished
        if not done.success or len(done.done) != self._count:
            raise RuntimeError(f"{len(done.done)} of {self._count} rows: {done.error}")
        return self._count / taken


@contextmanager
def opened(address: str, count: int, *, straight: bool = False) -> Iterator[Rows]:
    rows = Rows(address, count, straight=straight)
    try:
        yield rows
    finally:
        rows.close()


def measured(ways: dict[str, Rows], rounds: int, act: Callable[[Rows], float]) -> dict[str, Any]:
    """Of each way: rows a second, this process's time for each, and rows a second beside the last way's, round by round."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        # The order turns, so that none always comes after the same one.
        for name in list(ways)[:: -1 if number % 2 else 1]:
            rates[name].append(act(ways[name]))
            spent[name].append(ways[name].seconds_per_row)
    base = rates[list(ways)[-1]]
    return {
        name: {
            "rows_per_second": spread(rates[name]).as_json(),
            "engine_seconds_per_row": spread(spent[name]).as_json(),
            "ratio": spread(
                [mine / theirs for mine, theirs in zip(rates[name], base, strict=True)]
            ).as_json(),
        }
        for name in ways
    }


def line_of(what: str, found: dict[str, Any]) -> tuple[str, ...]:
    cells = [what]
    for each in found.values():
        ratio = each["ratio"]
        cells.append(
            f"{each['rows_per_second']['median']:,.0f} ({1000 * each['engine_seconds_per_row']['median']:.2f} ms; "
            f"{ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}])"
        )
    return tuple(cells)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=PAIRS, help=f"rounds (default {PAIRS})")
    parser.add_argument("--rows", type=int, default=64, help="in one job (default 64)")
    parser.add_argument(
        "--cold", action="store_true", help="nothing of what is loaded lies in the service's memory"
    )
    add_json_flag(parser)
    args = parser.parse_args()
    check_json_target(args)
    with ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-bench-rows-")))
        service = ends.enter_context(
            ServiceProcess(
                folder / "kv",
                disk=8 << 30,
                segment=64 << 20,
                staging=256 << 20,
                # A cache of less than a job holds nothing of it when it is loaded again.
                cache=32 << 20 if args.cold else 1 << 30,
                arenas=256 << 20,
                listen="127.0.0.1:0",
                unsafe_plaintext_tcp=True,
                unsafe_no_token=True,
            )
        )
        here, there = str(folder / "kv"), f"tcp://127.0.0.1:{port_of(service)}"
        ways = {
            "straight": ends.enter_context(opened(here, args.rows, straight=True)),
            "shared": ends.enter_context(opened(here, args.rows)),
            "socket": ends.enter_context(opened(there, args.rows)),
        }
        for way in ways.values():
            way.store()
            way.load()
        found = {
            "store": measured(ways, args.pairs, Rows.store),
            "load": measured(ways, args.pairs, Rows.load),
        }
    emit(
        args,
        {"row_bytes": ROW_BYTES, "rows": args.rows, "cold": args.cold, **found},
        table(
            [line_of(what, each) for what, each in found.items()],
            head=("rows of 1 MiB a second (engine's time a row; beside the socket)", *ways),
        ),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
