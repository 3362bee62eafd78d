"""What every store in the comparison is asked to do. Standard library only: it runs in the rivals' environments too."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

BLOCK_TOKENS = 128
TOKEN_IDS = 129_280
PROMPT_BLOCKS_MAX = 4096


class Tier(StrEnum):
    """MEMORY: what is read lies in the store's memory. DISK: nothing that is read is in memory when reading begins."""

    MEMORY = "memory"
    DISK = "disk"


class PeerFailed(Exception):
    """A store that could not be started, or did not do what it was asked. The text is the reason, for the table."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one turn works. `directory` is empty and on a real disk; `set_bytes`: of all payloads of a pass; `scripts`:
    the folder of the environment's own commands."""

    directory: Path
    tier: Tier
    set_bytes: int
    scripts: Path


@dataclass(frozen=True, slots=True)
class Prompt:
    """So many whole blocks that belong together. Two prompts of different `number` share no block."""

    number: int
    blocks: int

    def tokens(self) -> list[int]:
        """`BLOCK_TOKENS` token ids a block, the first two of which name the prompt."""
        head = [self.number % TOKEN_IDS, self.number // TOKEN_IDS]
        step = 2 * self.number + 1
        return head + [(step * i) % TOKEN_IDS for i in range(2, self.blocks * BLOCK_TOKENS)]

    def names(self) -> list[str]:
        """A key a block, for stores that take any."""
        return [f"{self.number}-{index}" for index in range(self.blocks)]


class Peer(ABC):
    """One store, as a client of it sees it. Calls come in the order start, put..., settle, restart, get..., stop; put and get
    from `threads` threads at once. All of them raise PeerFailed, or what the store's own client raises."""

    block_bytes: int
    """Of a payload. As close to the profile's block as the store can hold."""
    threads = 1
    """Of the client."""
    checks_itself = False
    """Whether `get` compares checksums by itself. Where not, `got` does it."""

    def __init__(self, place: Place) -> None:
        self.place = place

    @abstractmethod
    def start(self) -> None:
        """Ready to be written to on return."""

    @abstractmethod
    def stop(self) -> None:
        """End all that was started, also after a failure half-way."""

    def buffers(self, source: memoryview, room: memoryview) -> None:  # noqa: B027
        """The memory that payloads come from and go to, for clients that want to know it beforehand. Called after each start,
        and perhaps again."""

    def memory(self, blocks: int) -> tuple[memoryview, memoryview] | None:
        """Where the payloads are to come from and to go to, block after block without gaps, for stores that must have made
        that memory themselves. Called after the first start."""
        return None

    @abstractmethod
    def put(self, prompt: Prompt, payloads: Sequence[memoryview]) -> None:
        """Store all blocks of the prompt. Returns when the store has acknowledged them."""

    @abstractmethod
    def get(
        self, prompt: Prompt, rooms: Sequence[memoryview], got: Callable[[int], None], *, verify: bool
    ) -> None:
        """Bring all blocks of the prompt into memory of this process; got(i) as soon as block i is there. `verify` is for
        stores that check by themselves."""

    @abstractmethod
    def forget(self) -> None:
        """Make room for a pass that writes as much again: what was put is not read any more."""

    def settle(self) -> None:  # noqa: B027
        """What was put is in files, or on its way there through the page cache only. DISK only."""

    def restart(self) -> None:
        """Empty all memory of the store; what it has on disk stays. DISK only."""
        self.stop()
        self.start()
