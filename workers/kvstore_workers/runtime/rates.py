"""Measured rates of one worker, for the prices in a plan."""

from __future__ import annotations

import threading

from kvstore_client.values import Costs
from kvstore_workers.model.config import TILE

NEW_SHARE = 0.2
"""Weight of the newest measurement: a change of speed is followed within a dozen requests, one outlier hardly shows."""

SMALLEST = 1e-15
"""A measured rate is never reported as 0, which means 'not known'."""

PRIOR_WEIGHT = 0.05
"""How much the price of an index entry that was measured at the start counts beside one of what came after. Prompts of
one length hardly tell the two prices apart, and then the first measurement decides."""


def follow(old: float, new: float) -> float:
    """The moving average after `new`; an average of 0 has seen nothing yet."""
    return new if old == 0.0 else old + NEW_SHARE * (new - old)


class ComputeRates:
    """Seconds per layer-token and per index entry: a line through (index entries per layer-token, seconds per
    layer-token), in which older measurements fade."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._mean_x = self._mean_y = 0.0
        self._xx = self._xy = 0.0
        self._prior_slope = 0.0
        self._prior_xx = 0.0

    def prime(self, *, layer_token: float, index_entry: float, spread: float) -> None:
        """Prices measured before any request, with index densities that lay `spread` apart."""
        self._prior_slope = max(index_entry, 0.0)
        self._prior_xx = PRIOR_WEIGHT * spread * spread
        self._weight, self._mean_x, self._mean_y = 1.0, 0.0, max(layer_token, SMALLEST)

    def note(self, *, layer_tokens: float, index_entries: float, seconds: float) -> None:
        x, y = index_entries / layer_tokens, seconds / layer_tokens
        kept = 1.0 - NEW_SHARE
        weight = self._weight * kept + 1.0
        step_x, step_y = x - self._mean_x, y - self._mean_y
        share = self._weight * kept / weight
        self._xx = self._xx * kept + share * step_x * step_x
        self._xy = self._xy * kept + share * step_x * step_y
        self._mean_x += step_x / weight
        self._mean_y += step_y / weight
        self._weight = weight

    def prices(self) -> tuple[float, float]:
        """(seconds per layer-token, seconds per index entry); (0, 0) while nothing was measured."""
        if self._weight == 0.0:
            return 0.0, 0.0
        xx = self._xx + self._prior_xx
        slope = (self._xy + self._prior_slope * self._prior_xx) / xx if xx > 0.0 else 0.0
        # Neither price can be below zero: then the other one explains all of it.
        slope = min(max(slope, 0.0), self._mean_y / self._mean_x if self._mean_x > 0.0 else slope)
        return max(self._mean_y - slope * self._mean_x, SMALLEST), slope


class Rates:
    """Moving averages; 0 until measured, so that the service uses what it knows. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._compute = ComputeRates()
        self._ssd_byte = 0.0
        self._memory_byte = 0.0
        self._load_byte = 0.0
        self._fetch = 0.0

    def prime(self, *, layer_token: float, index_entry: float, spread: float) -> None:
        """Prices of computing that were measured before any request: see ComputeRates."""
        with self._lock:
            self._compute.prime(layer_token=layer_token, index_entry=index_entry, spread=spread)

    def computed(self, *, layer_tokens: float, index_entries: float, seconds: float) -> None:
        """Note that computing `layer_tokens` (tokens x layers), whose index scans looked at `index_entries`, took
        `seconds`."""
        if layer_tokens > 0:
            with self._lock:
                self._compute.note(layer_tokens=layer_tokens, index_entries=index_entries, seconds=seconds)

    def fetched(
        self, *, first_seconds: float, rest_seconds: float, rest_bytes: int, from_memory: bool
    ) -> None:
        """Note a fetch: its first item came after `first_seconds`, `rest_bytes` more in `rest_seconds`.

        The first item's wait is what any fetch costs; the rest gives the rate per byte of the tier that most bytes
        came from.
        """
        with self._lock:
            self._fetch = follow(self._fetch, max(first_seconds, SMALLEST))
            if rest_bytes <= 0:
                return
            rate = max(rest_seconds / rest_bytes, SMALLEST)
            if from_memory:
                self._memory_byte = follow(self._memory_byte, rate)
            else:
                self._ssd_byte = follow(self._ssd_byte, rate)

    def loaded(self, *, bytes_loaded: int, seconds: float) -> None:
        """Note that making rows and entries of `bytes_loaded` fetched bytes took `seconds`: part of each byte's price,
        whichever tier it is from."""
        if bytes_loaded > 0:
            with self._lock:
                self._load_byte = follow(self._load_byte, max(seconds / bytes_loaded, SMALLEST))

    def compute_seconds(self, layer_tokens: float, index_entries: float) -> float:
        """What that work is expected to take; 0 while nothing was measured."""
        with self._lock:
            layer_token, index_entry = self._compute.prices()
        return layer_tokens * layer_token + index_entries * index_entry

    def costs(self) -> Costs:
        with self._lock:
            layer_token, index_entry = self._compute.prices()
            return Costs(
                seconds_per_layer_token=layer_token,
                seconds_per_index_entry=index_entry,
                seconds_per_ssd_byte=self._ssd_byte + self._load_byte if self._ssd_byte else 0.0,
                seconds_per_memory_byte=self._memory_byte + self._load_byte if self._memory_byte else 0.0,
                seconds_per_fetch=self._fetch,
                tile_tokens=TILE,
            )
