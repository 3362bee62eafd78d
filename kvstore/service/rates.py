"""The rates that plans are priced with: what callers report, what this service measures, and defaults."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import fields, replace

from kvstore.plan.base import Costs
from kvstore.types import NamespaceDigest

UNKNOWN = Costs(**{field.name: 0 for field in fields(Costs)})
"""Nothing is known: every rate is zero."""

KEPT_BYTES = 1 << 30
"""How far back the read rate remembers: what was read so many bytes ago counts for about a third."""

NAMESPACES = 4096
"""Namespaces whose reports are remembered; past it, those that reported longest ago are forgotten."""


class ReadRate:
    """Seconds per byte of reads from SSD, as one reader meets them: a moving average by bytes. Any thread may note."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds = 0.0
        self._bytes = 0.0

    def note(self, length: int, seconds: float) -> None:
        """`length` bytes > 0 took so many seconds."""
        with self._lock:
            left = max(0.0, 1.0 - length / KEPT_BYTES)
            self._seconds = self._seconds * left + seconds
            self._bytes = self._bytes * left + length

    @property
    def seconds_per_byte(self) -> float:
        """0 before anything was read."""
        with self._lock:
            return self._seconds / self._bytes if self._bytes else 0.0


class Rates:
    """Completes what a caller knows. A rate of zero is not known."""

    def __init__(self, reads: ReadRate) -> None:
        self.reads = reads
        self._reported: OrderedDict[NamespaceDigest, Costs] = OrderedDict()

    def report(self, namespace: NamespaceDigest, given: Costs) -> None:
        """A caller has measured these: they hold for others of the namespace that know less."""
        if given != UNKNOWN:
            self._reported[namespace] = _filled(given, self._reported.pop(namespace, UNKNOWN))
            if len(self._reported) > NAMESPACES:
                self._reported.popitem(last=False)

    def complete(self, namespace: NamespaceDigest, given: Costs) -> Costs:
        """`given`, then what was reported in the namespace last, then what was measured here, then the defaults."""
        known = _filled(given, self._reported.get(namespace, UNKNOWN))
        return _filled(_filled(known, self._measured(known)), Costs())

    def _measured(self, known: Costs) -> Costs:
        # What is read here has yet to reach the worker: no byte from SSD gets there sooner than one from memory.
        memory = known.seconds_per_memory_byte or Costs().seconds_per_memory_byte
        own = self.reads.seconds_per_byte
        return replace(UNKNOWN, seconds_per_ssd_byte=max(own, memory) if own else 0.0)


def _filled(costs: Costs, other: Costs) -> Costs:
    """`costs`, with the other's rates where it has none."""
    return Costs(
        **{field.name: getattr(costs, field.name) or getattr(other, field.name) for field in fields(Costs)}
    )
