"""Blocks that come by layers: a thread fetches slices while the model already runs the first layers."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from kvstore.clock import Clock
from kvstore.profile.layout import LayerSlice, layer_slices
from kvstore.types import BytesLike
from kvstore_client.client import Lookup
from kvstore_workers.runtime.stop import Stop, Stopped
from kvstore_workers.runtime.store import STORE_FAILURES, PrefixStore
from kvstore_workers.runtime.trace import Trace

SLICES = 4
"""Into how many slices the blocks of a restore are cut."""

SHOWN_SECONDS = 1e-4
"""Shorter waits are not shown in a trace."""

SLICED_BYTES = 2 << 20
"""From how many bytes of blocks on it is worth a thread to overlap fetching with running."""


class SlicedFeed:
    """One restore's blocks on their way: an EntryFeed. The fetching thread takes bytes in, the model's thread takes them
    out, as it comes to the layers. The lookup's lease is released when the fetch has ended. Waiting is bounded by the
    deadline of the fetch call.
    """

    def __init__(
        self,
        store: PrefixStore,
        looked_up: Lookup,
        *,
        blocks: int,
        state_items: int,
        stop: Stop,
        clock: Clock,
        trace: Trace,
    ) -> None:
        self.blocks = blocks
        self.wait_seconds = 0.0
        self.fetch_seconds = 0.0
        self._store = store
        self._looked_up = looked_up
        self._state_items = state_items
        self._cuts = layer_slices(store.profile, SLICES)
        self._stop = stop
        self._clock = clock
        self._trace = trace
        self._began = clock.monotonic()
        self._changed = threading.Condition()
        self._state: list[BytesLike] = []
        self._slices: deque[list[BytesLike]] = deque()
        self._taken = 0
        self._ended = False
        self._given_up = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._fetch, name="block-fetch", daemon=True)
        self._thread.start()

    # ---- the model's side --------------------------------------------------------------------------------------

    def state(self) -> tuple[BytesLike, ...]:
        """What the plan's window state is made of, which comes first."""
        self._wait(lambda: len(self._state) == self._state_items)
        return tuple(self._state)

    def __iter__(self) -> SlicedFeed:
        return self

    def __next__(self) -> tuple[LayerSlice, list[BytesLike]]:
        """The next slice with those bytes of every block, waited for; raises what made the fetch fail."""
        if self._taken == len(self._cuts):
            raise StopIteration
        began = self._clock.monotonic()
        self._wait(lambda: self._slices)
        self._taken += 1
        waited = self._clock.monotonic()
        self.wait_seconds += waited - began
        if waited - began > SHOWN_SECONDS:
            self._trace.add(f"wait for slice {self._taken - 1}", "compute", began=began, ended=waited)
        return self._cuts[self._taken - 1], self._slices.popleft()

    def close(self) -> None:
        """Give up what has not come yet; the thread has ended on return."""
        with self._changed:
            self._given_up = True
        self._thread.join()

    def _wait(self, there: Callable[[], object]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: there() or self._ended)
            if not there():
                assert self._error is not None, "a fetch that ended well has brought everything"
                raise self._error

    # ---- the fetching thread -----------------------------------------------------------------------------------

    def _fetch(self) -> None:
        error: BaseException | None = None
        try:
            self._read()
        except (*STORE_FAILURES, Stopped) as failure:
            error = failure
        except Exception as fault:  # noqa: BLE001 -- raised in the model's thread, which waits for it
            error = fault
        finally:
            self.fetch_seconds = self._clock.monotonic() - self._began
            self._store.release(self._looked_up)
        with self._changed:
            self._error, self._ended = error, True
            self._changed.notify_all()

    def _read(self) -> None:
        began = self._began
        first_at: float | None = None
        rest = 0
        slice_began = began
        arriving: list[BytesLike] = []
        for number, payload in self._store.fetch_slices(
            self._looked_up, blocks=self.blocks, slices=SLICES, check=self._check
        ):
            if first_at is None:
                first_at = self._clock.monotonic()
            else:
                rest += len(payload)
            if number is None:
                with self._changed:
                    self._state.append(payload)
                    self._changed.notify_all()
                continue
            arriving.append(payload)
            if len(arriving) == self.blocks:
                now = self._clock.monotonic()
                self._trace.add(
                    f"fetch slice {number}", "fetch", began=slice_began, ended=now, blocks=self.blocks
                )
                slice_began = now
                with self._changed:
                    self._slices.append(arriving)
                    self._changed.notify_all()
                arriving = []
        ended = self._clock.monotonic()
        if first_at is not None:
            self._store.note_fetch(
                self._looked_up.plan, began=began, first_at=first_at, ended=ended, rest_bytes=rest
            )

    def _check(self) -> None:
        self._stop.check()
        if self._given_up:
            raise Stopped
