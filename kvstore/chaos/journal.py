"""What the load was promised, one line per event, in a file outside of the store that outlives the load.

A line is the event's word, the length of the block log when it was written (0 without one), and numbers. The last line
may be cut off by a kill: then its event did not happen, which is always the harmless reading.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self


class Word(StrEnum):
    """TRY, DONE: [first, last) is about to be appended, was acknowledged. DROP: numbers are about to be discarded.
    CLEAR, CLEARED: (namespace, number, 1 for states only): everything of it below that number is about to go, is gone
    for good. POLICY, POLICY_DONE: (namespace, policy's number). FOUND: an opening of the store found these numbers.
    WRONG: what the load itself saw and may not be, in words."""

    TRY = "try"
    DONE = "done"
    DROP = "drop"
    CLEAR = "clear"
    CLEARED = "cleared"
    POLICY = "policy"
    POLICY_DONE = "policy-done"
    FOUND = "found"
    WRONG = "wrong"


class Event(NamedTuple):
    word: Word
    position: int
    numbers: tuple[int, ...] = ()
    text: str = ""


def policy_text(number: int) -> str:
    return f"periodic:{128 * (number + 1)}"


def encode_event(event: Event) -> bytes:
    rest = event.text.replace("\n", " ") if event.word is Word.WRONG else " ".join(map(str, event.numbers))
    return f"{event.word} {event.position} {rest}\n".encode()


def decode_events(data: bytes) -> list[Event]:
    """Every whole line, in order."""
    events = []
    for line in data.decode().split("\n")[:-1]:
        word, position, rest = line.split(" ", 2)
        if word == Word.WRONG:
            events.append(Event(Word.WRONG, int(position), text=rest))
        else:
            events.append(Event(Word(word), int(position), tuple(map(int, rest.split()))))
    return events


class Journal:
    """Appends events to a file with one write each: what was said before a kill is in the file after it."""

    def __init__(self, path: Path, *, block_log: Path | None = None) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._block_log = block_log
        # Taken now: a load counts and replaces calls of `os` later on.
        self._write = os.write

    def say(self, word: Word, numbers: Iterable[int] = (), text: str = "") -> None:
        position = self._block_log.stat().st_size if self._block_log is not None else 0
        self._write(self._file, encode_event(Event(word, position, tuple(numbers), text)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)


def read_journal(path: Path) -> list[Event]:
    return decode_events(path.read_bytes()) if path.exists() else []
