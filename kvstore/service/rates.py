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

PRIOR_BYTES = 64 << 20
"""What the default rate weighs against what is measured. A plan that reads nothing measures nothing: without this weight one
slow read of a few kilobytes would price all reads too high, and nobody would read again."""

NAMESPACES = 4096
"""Namespaces whose reports are remembered; past it, those that reported longest ago are forgotten."""


class ReadRate:
    """Seconds per byte of reads from SSD, as one reader meets them: a moving average by bytes, which begins with the default. Any thread may
    note."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rate = 0.0
        self._seconds = PRIOR_BYTES * Costs().seconds_per_ssd_byte
        self._bytes = float(PRIOR_BYTES)

    def note(self, length: int, seconds: float) -> None:
        """`length` bytes > 0 took so many seconds."""
        with self._lock:
            left = max(0.0, 1.0 - length / KEPT_BYTES)
            self._seconds = self._seconds * left + seconds
            self._bytes = self._bytes * left + length
            self._rate = self._seconds / self._bytes

    @property
    def seconds_per_byte(self) -> float:
        """0 before anything was read."""
        return self._rate


class Rates:
    """Completes what a caller knows. A rate of zero is not known."""

    def __init__(self, reads: ReadRate) -> None:
        self.reads = reads
        # What was given last, and what is known with it.
        self._reported: OrderedDict[NamespaceDigest, tuple[Costs, Costs]] = OrderedDict()
        self._newest: tuple[NamespaceDigest, Costs] | None = None
        # What was completed last: as given, at which rate of reads, the answer. Gone when more is known.
        self._completed: dict[NamespaceDigest, tuple[Costs, float, Costs]] = {}

    def report(self, namespace: NamespaceDigest, given: Costs) -> None:
        """A caller has measured these: they hold for others of the namespace that know less."""
        if self._newest is not None and self._newest[1] is given and self._newest[0] == namespace:
            return
        self._newest = namespace, given
        last = self._reported.get(namespace)
        # Mostly it is the same object, which takes no comparison of all rates.
        if last is not None and (last[0] is given or last[0] == given):
            self._reported.move_to_end(namespace)
            return
        if given == UNKNOWN:
            return
        self._reported.pop(namespace, None)
        self._reported[namespace] = given, _filled(given, UNKNOWN if last is None else last[1])
        self._completed.pop(namespace, None)
        if len(self._reported) > NAMESPACES:
            self._completed.pop(self._reported.popitem(last=False)[0], None)

    def complete(self, namespace: NamespaceDigest, given: Costs) -> Costs:
        """`given`, then what was reported in the namespace last, then what was measured here, then the defaults."""
        own = self.reads.seconds_per_byte
        last = self._completed.get(namespace)
        if last is not None and last[1] == own and (last[0] is given or last[0] == given):
            return last[2]
        reported = self._reported.get(namespace)
        known = given if reported is None else _filled(given, reported[1])
        completed = _filled(_filled(known, self._measured(known, own)), Costs())
        if len(self._completed) >= NAMESPACES:
            self._completed.clear()
        self._completed[namespace] = given, own, completed
        return completed

    def _measured(self, known: Costs, own: float) -> Costs:
        # What is read here has yet to reach the worker: no byte from SSD gets there sooner than one from memory.
        memory = known.seconds_per_memory_byte or Costs().seconds_per_memory_byte
        return replace(UNKNOWN, seconds_per_ssd_byte=max(own, memory) if own else 0.0)


def _filled(costs: Costs, other: Costs) -> Costs:
    """`costs`, with the other's rates where it has none."""
    return Costs(
        **{field.name: getattr(costs, field.name) or getattr(other, field.name) for field in fields(Costs)}
    )
