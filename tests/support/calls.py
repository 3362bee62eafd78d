"""Calls on a service that may be away."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from kvstore.errors import KvstoreError, Unavailable, UnknownLease, UnknownReservation, UnknownSession
from kvstore_client import CacheClient, Costs, Lookup
from tests.support.chains import Chain

GONE = (Unavailable, UnknownLease, UnknownReservation, UnknownSession)
"""What a caller may see while the service goes away."""

EAGER = Costs(seconds_per_layer_token=1.0)
"""A price of computing at which every plan restores all that it can."""

T = TypeVar("T")


def look(
    client: CacheClient,
    chain: Chain,
    *,
    lease: bool = True,
    announce: bool = False,
    wait_seconds: float = 0.0,
    costs: Costs = EAGER,
) -> Lookup:
    """A prompt one token longer than the chain, at eager costs."""
    return client.lookup(
        chain.namespace.digest,
        chain.keys,
        prompt_tokens=len(chain.keys) * chain.namespace.block_tokens + 1,
        costs=costs,
        lease=lease,
        announce=announce,
        wait_seconds=wait_seconds,
    )


def within(seconds: float, call: Callable[[], T]) -> T:
    """The first answer of `call`, asked again while it is refused as Unavailable."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return call()
        except Unavailable:
            assert time.monotonic() < deadline, f"still unavailable after {seconds:g} s"


class Caller(threading.Thread):
    """Makes one call beside the test and keeps how it ended: `answer` or `error`."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__()
        self._call = call
        self.answer: object = None
        self.error: KvstoreError | None = None

    def run(self) -> None:
        try:
            self.answer = self._call()
        except KvstoreError as error:
            self.error = error
