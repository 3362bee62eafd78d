"""Rows of the vLLM tier through shared memory, and the same rows as bytes through a socket: pairs in one run.

    python benchmarks/engines/rows.py [--pairs N] [--rows N] [--json [FILE]]

The tier's own helper threads move rows of 1 MiB between an engine's pool, which is this process's memory, and one service: a tier whose
session has an arena and mapped memory, and a tier on a loopback connection (without TLS). No engine is needed.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "clients")]

from kvstore.bench.pairs import PAIRS, interleaved, spread  # noqa: E402
from kvstore.cli.output import add_json_flag, check_json_target, emit, table  # noqa: E402
from kvstore.clock import SystemClock  # noqa: E402
from kvstore.prefix.identity import NamespaceIdentity  # noqa: E402
from kvstore.profile.keyed import KeyedProfile  # noqa: E402
from kvstore_client import CacheClient, KeyedStore  # noqa: E402
from kvstore_vllm.rows import RowTier  # noqa: E402
from kvstore_vllm.settings import TierSettings  # noqa: E402
from tests.support.remote import port_of  # noqa: E402
from tests.support.service import ServiceProcess  # noqa: E402

ROW_BYTES = 1 << 20
STEP_SECONDS = 0.001


class Rows:
    """One tier over a pool of `count` rows, driven as a scheduler would: a job is submitted, and its end is waited for."""

    def __init__(self, address: str, count: int) -> None:
        self._count = count
        self._pool = bytearray(secrets.token_bytes(ROW_BYTES) * count)
        self._client = CacheClient(address, owner="bench", insecure=address.startswith("tcp:"))
        profile = KeyedProfile(name="rows", payload_bytes=ROW_BYTES)
        identity = NamespaceIdentity(profile=profile, weights_revision="1", numerics="bench")
        self._tier = RowTier(
            KeyedStore(self._client, identity, name="rows"),
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

    def store(self) -> float:
        """Rows a second, durable."""
        self._keys = [secrets.token_bytes(32) for _ in range(self._count)]
        return self._run(is_load=False)

    def load(self) -> float:
        """Rows a second, checked against their writer's sums, of what was stored last."""
        return self._run(is_load=True)

    def _run(self, *, is_load: bool) -> float:
        self._number += 1
        begin = time.perf_counter()
        (self._tier.load if is_load else self._tier.store)(self._number, self._keys, list(range(self._count)))
        while not (finished := self._tier.finished()):
            # An engine's step, which computes elsewhere meanwhile.
            self._pause.wait(STEP_SECONDS)
        taken = time.perf_counter() - begin
        [done] = finished
        if not done.success or len(done.done) != self._count:
            raise RuntimeError(f"{len(done.done)} of {self._count} rows: {done.error}")
        return self._count / taken


@contextmanager
def opened(address: str, count: int) -> Iterator[Rows]:
    rows = Rows(address, count)
    try:
        yield rows
    finally:
        rows.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=PAIRS, help=f"default {PAIRS}")
    parser.add_argument("--rows", type=int, default=64, help="in one job (default 64)")
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
                cache=1 << 30,
                arenas=256 << 20,
                listen="127.0.0.1:0",
                unsafe_plaintext_tcp=True,
                unsafe_no_token=True,
            )
        )
        shared = ends.enter_context(opened(str(folder / "kv"), args.rows))
        socket = ends.enter_context(opened(f"tcp://127.0.0.1:{port_of(service)}", args.rows))
        for side in (shared, socket):
            side.store()
            side.load()
        found = {}
        for name in ("store", "load"):
            pairs = list(interleaved(args.pairs, ours=getattr(shared, name), theirs=getattr(socket, name)))
            found[name] = {
                "ratio": spread([pair.ratio for pair in pairs]).as_json(),
                "shared_rows_per_second": spread([pair.ours for pair in pairs]).as_json(),
                "socket_rows_per_second": spread([pair.theirs for pair in pairs]).as_json(),
            }
    lines = [
        (
            name,
            *(f"{found[name][f'{side}_rows_per_second']['median']:,.0f}" for side in ("shared", "socket")),
            f"{found[name]['ratio']['median']:.2f} [{found[name]['ratio']['low']:.2f}, {found[name]['ratio']['high']:.2f}]",
        )
        for name in found
    ]
    emit(
        args,
        {"row_bytes": ROW_BYTES, "rows": args.rows, **found},
        table(lines, head=("rows of 1 MiB a second", "shared memory", "socket", "ratio")),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
