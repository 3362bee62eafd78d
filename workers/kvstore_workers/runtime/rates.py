"""Measured rates of one worker, for the prices in a plan."""

from __future__ import annotations

from kvstore_client.values import Costs

NEW_SHARE = 0.2
"""Weight of the newest measurement: a change of speed is followed within a dozen requests, one outlier hardly shows."""

SMALLEST = 1e-15
"""A measured rate is never reported as 0, which means 'not known'."""


def follow(old: float, new: float) -> float:
    """The moving average after `new`; an average of 0 has seen nothing yet."""
    return new if old == 0.0 else old + NEW_SHARE * (new - old)


class Rates:
    """Moving averages; 0 until measured, so that the service uses its own. Not for several threads at once."""

    def __init__(self) -> None:
        self._layer_token = 0.0
        self._ssd_byte = 0.0
        self._memory_byte = 0.0
        self._fetch = 0.0

    def computed(self, *, layer_tokens: int, seconds: float) -> None:
        """Note that computing `layer_tokens` (tokens x layers) took `seconds`."""
        if layer_tokens > 0:
            self._layer_token = follow(self._layer_token, max(seconds / layer_tokens, SMALLEST))

    def fetched(
        self, *, first_seconds: float, rest_seconds: float, rest_bytes: int, from_memory: bool
    ) -> None:
        """Note a fetch: its first item came after `first_seconds`, `rest_bytes` more in `rest_seconds`.

        The first item's wait is what any fetch costs; the rest gives the rate per byte of the tier that most bytes
        came from.
        """
        self._fetch = follow(self._fetch, max(first_seconds, SMALLEST))
        if rest_bytes <= 0:
            return
        rate = max(rest_seconds / rest_bytes, SMALLEST)
        if from_memory:
            self._memory_byte = follow(self._memory_byte, rate)
        else:
            self._ssd_byte = follow(self._ssd_byte, rate)

    def costs(self) -> Costs:
        return Costs(
            seconds_per_layer_token=self._layer_token,
            seconds_per_ssd_byte=self._ssd_byte,
            seconds_per_memory_byte=self._memory_byte,
            seconds_per_fetch=self._fetch,
        )
