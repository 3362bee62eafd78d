"""One turn: start one store, write and read a set of blocks, and say how fast. Run as a process of its own.

    python -m benchmarks.peers.turn '{"peer": "mooncake", "tier": "memory", ...}'

The last line on stdout is the answer in JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.peers.base import Peer, PeerFailed, Place, Prompt, Tier
from benchmarks.peers.payloads import Payloads
from benchmarks.peers.processes import drop_page_cache, sync_files

WARM, TIMED = 0, 1
"""Passes over the set. The first one makes files, memory and connections what they are for good."""


@dataclass(frozen=True, slots=True)
class Task:
    """`module`: where the store's class, `Store`, is. `options`: its own."""

    module: str
    options: dict[str, Any]
    tier: str
    set_bytes: int
    prompt_blocks: int
    directory: str
    scripts: str
    seed: int


class Turn:
    def __init__(self, peer: Peer, payloads: Payloads, task: Task) -> None:
        self._peer, self._payloads, self._task = peer, payloads, task
        self._threads = ThreadPoolExecutor(peer.threads)
        self.rates: dict[str, float] = {}
        self.notes: dict[str, str] = {}

    def run(self) -> None:
        peer, payloads = self._peer, self._payloads
        peer.buffers(payloads.source, payloads.room)
        self._put(WARM)
        if self._task.tier == Tier.DISK:
            self._settled()
        peer.forget()
        peer.buffers(payloads.source, payloads.room)
        begin = time.perf_counter()
        self._put(TIMED)
        self._note("put", time.perf_counter() - begin)
        if self._task.tier == Tier.DISK:
            self._settled()
            self._note("put_durable", time.perf_counter() - begin)
            self._read_cold()
        else:
            self._get("warm", verify=True)
            self._get("get", verify=False)
            self._get("get_verified", verify=True)

    def _read_cold(self) -> None:
        peer, payloads = self._peer, self._payloads
        peer.restart()
        peer.buffers(payloads.source, payloads.room)
        self.notes["dropped_by"] = drop_page_cache(Path(self._task.directory))
        self._get("get_verified", verify=True)

    def _settled(self) -> None:
        self._peer.settle()
        sync_files(Path(self._task.directory))

    def _put(self, turn: int) -> None:
        def work(prompt: Prompt, numbers: range) -> None:
            self._peer.put(prompt, self._payloads.blocks[numbers.start : numbers.stop])

        self._all(turn, work)

    def _get(self, name: str, *, verify: bool) -> None:
        payloads, peer = self._payloads, self._peer

        def work(prompt: Prompt, numbers: range) -> None:
            def got(index: int) -> None:
                if verify and not peer.checks_itself:
                    payloads.check(numbers[index])

            peer.get(prompt, payloads.rooms[numbers.start : numbers.stop], got, verify=verify)

        payloads.blank()
        begin = time.perf_counter()
        self._all(TIMED, work)
        self._note(name, time.perf_counter() - begin)
        if wrong := payloads.wrong():
            raise PeerFailed(f"{name}: {wrong} of {payloads.count} blocks are not what was stored")

    def _all(self, turn: int, work: Callable[[Prompt, range], None]) -> None:
        pieces = prompts(turn, self._payloads.count, self._task.prompt_blocks)
        for _ in self._threads.map(lambda piece: work(*piece), pieces):
            pass

    def _note(self, name: str, seconds: float) -> None:
        self.rates[name] = self._payloads.count * self._payloads.block_bytes / seconds


def prompts(turn: int, blocks: int, prompt_blocks: int) -> Sequence[tuple[Prompt, range]]:
    """The set cut into prompts, with the numbers of their blocks; no prompt of one pass is in another."""
    per_pass = -(-blocks // prompt_blocks)
    pieces = []
    for number in range(per_pass):
        numbers = range(number * prompt_blocks, min((number + 1) * prompt_blocks, blocks))
        pieces.append((Prompt(1 + turn * per_pass + number, len(numbers)), numbers))
    return pieces


def main(text: str) -> NoReturn:
    task = Task(**json.loads(text))
    answer: dict[str, Any] = {}
    place = Place(Path(task.directory), Tier(task.tier), task.set_bytes, Path(task.scripts))
    peer: Peer = importlib.import_module(task.module).Store(place, **task.options)
    # Whole prompts: some stores write in groups and leave the rest for later.
    count = task.set_bytes // peer.block_bytes // task.prompt_blocks * task.prompt_blocks
    answer |= {"blocks": count, "block_bytes": peer.block_bytes, "threads": peer.threads}
    try:
        peer.start()
        turn = Turn(peer, Payloads(count, peer.block_bytes, seed=task.seed, memory=peer.memory(count)), task)
        answer |= {"rates": turn.rates, "notes": turn.notes}
        turn.run()
    # Whatever a store's client raises is a reason in the table.
    except Exception as error:  # noqa: BLE001
        answer["failed"] = str(error) if isinstance(error, PeerFailed) else f"{type(error).__name__}: {error}"
    print(json.dumps(answer), flush=True)
    peer.stop()
    # Some clients leave threads behind that an ordinary exit would wait for.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
