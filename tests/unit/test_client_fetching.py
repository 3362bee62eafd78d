"""A fetch that breaks off anywhere goes on, with right bytes or none; retries have a budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import DamagedBytes
from kvstore.types import ItemKind
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.breaker import RETRY_TOKENS_MAX, RetryBudget
from kvstore_client.checks import make_checks
from kvstore_client.fetching import RESUMPTIONS_MAX, Fetching
from kvstore_client.framing import cut_frames
from kvstore_client.reading import StoredAgain
from kvstore_client.values import FetchedItem
from kvstore_client.wanted import Place, Whole

FIRST = 3


class Service:
    """Answers a FetchRequest as the contract says, in frames of so many bytes."""

    def __init__(
        self, blocks: Sequence[bytes | None], state: Sequence[bytes | None], *, frame_bytes: int
    ) -> None:
        self.blocks = list(blocks)
        self.state = list(state)
        self._frame_bytes = frame_bytes

    def answer(self, request: pb.FetchRequest) -> Iterator[pb.ItemFrame]:
        numbers = range(request.first_block, request.first_block + request.block_count)
        items = [(pb.BLOCK, number, self.blocks[number - FIRST]) for number in numbers]
        if request.state:
            items += [(pb.WINDOW_ROWS, number, payload) for number, payload in enumerate(self.state)]
        sent = []
        for place, (kind, number, payload) in enumerate(items):
            offset = request.offset if place == 0 and payload is not None else 0
            assert offset == 0 or offset < len(payload or b""), "nothing of the item is asked for"
            sent.append((item_header(kind, number, payload, offset), (payload or b"")[offset:]))
        for headers, data in cut_frames(sent, frame_bytes=self._frame_bytes):
            yield pb.ItemFrame(items=headers, data=data)


def item_header(kind: int, index: int, payload: bytes | None, offset: int) -> pb.ItemHeader:
    if payload is None:
        return pb.ItemHeader(kind=kind, index=index, missing=True)  # type: ignore[arg-type]
    checks = make_checks(payload)
    return pb.ItemHeader(
        kind=kind,  # type: ignore[arg-type]
        index=index,
        length=len(payload),
        offset=offset,
        crc32=checks.crc32,
        xxh3_64=checks.xxh3_64,
        has_xxh3=checks.has_xxh3,
        lineage=pb.LINEAGE_EXACT,
    )


def wanted(service: Service) -> Whole:
    state = tuple(Place(ItemKind.ROWS, number) for number in range(len(service.state)))
    return Whole(FIRST, len(service.blocks), state)


def stream(fetching: Fetching, service: Service, got: list[FetchedItem], *, frames: int | None) -> None:
    """Feed so many frames of one stream; None: all, and its end."""
    for number, frame in enumerate(service.answer(fetching.request())):
        if number == frames:
            return
        got.extend(fetching.feed(frame))
    if frames is None:
        fetching.finish()


payloads = st.lists(st.one_of(st.binary(max_size=30), st.none()), min_size=1, max_size=6)


@given(payloads, payloads, st.integers(1, 40), st.lists(st.integers(0, 20), max_size=RESUMPTIONS_MAX))
def test_wherever_it_breaks_each_item_comes_once_and_whole(
    blocks: list[bytes | None], state: list[bytes | None], frame_bytes: int, breaks: list[int]
) -> None:
    service = Service(blocks, state, frame_bytes=frame_bytes)
    fetching = Fetching(7, wanted(service), verify=True)
    got: list[FetchedItem] = []
    for frames in breaks:
        stream(fetching, service, got, frames=frames)
        if not fetching.may_go_on:
            break
        fetching.go_on(anew=False)
    if len(got) < len(blocks) + len(state):
        stream(fetching, service, got, frames=None)
    assert [item.payload for item in got] == [*blocks, *state]
    assert [item.index for item in got] == [*range(FIRST, FIRST + len(blocks)), *range(len(state))]


def test_bytes_that_came_are_not_asked_for_again() -> None:
    service = Service([b"a" * 10, b"b" * 10, b"c" * 10], [], frame_bytes=4)
    fetching = Fetching(7, wanted(service), verify=True)
    got: list[FetchedItem] = []
    stream(fetching, service, got, frames=4)
    fetching.go_on(anew=False)
    request = fetching.request()
    assert (request.first_block, request.block_count, request.offset) == (FIRST + 1, 2, 6)
    stream(fetching, service, got, frames=0)
    fetching.go_on(anew=False)
    assert fetching.request() == request
    stream(fetching, service, got, frames=None)
    assert [item.payload for item in got] == [b"a" * 10, b"b" * 10, b"c" * 10]


def test_of_an_item_that_was_stored_again_nothing_old_is_used() -> None:
    service = Service([b"old" * 10], [], frame_bytes=4)
    fetching = Fetching(7, wanted(service), verify=False)
    got: list[FetchedItem] = []
    stream(fetching, service, got, frames=2)
    service.blocks = [b"new" * 10]
    fetching.go_on(anew=False)
    assert fetching.request().offset == 8
    with pytest.raises(StoredAgain):
        stream(fetching, service, got, frames=None)
    fetching.go_on(anew=True)
    assert fetching.request().offset == 0
    stream(fetching, service, got, frames=None)
    assert [item.payload for item in got] == [b"new" * 10]


def test_an_item_that_went_meanwhile_is_missing() -> None:
    service = Service([b"a" * 10, b"b"], [], frame_bytes=4)
    fetching = Fetching(7, wanted(service), verify=True)
    got: list[FetchedItem] = []
    stream(fetching, service, got, frames=1)
    service.blocks[0] = None
    fetching.go_on(anew=False)
    # The service knows nothing of the item's end now.
    for header, data in (
        (item_header(pb.BLOCK, FIRST, None, 0), b""),
        (item_header(pb.BLOCK, FIRST + 1, b"b", 0), b"b"),
    ):
        got.extend(fetching.feed(pb.ItemFrame(items=[header], data=data)))
    fetching.finish()
    assert [item.payload for item in got] == [None, b"b"]


@pytest.mark.parametrize("offset", [1, 3, 5])
def test_an_item_that_goes_on_elsewhere_is_damage(offset: int) -> None:
    service = Service([b"abcdef"], [], frame_bytes=4)
    fetching = Fetching(7, wanted(service), verify=True)
    stream(fetching, service, [], frames=1)
    fetching.go_on(anew=False)
    frame = pb.ItemFrame(items=[item_header(pb.BLOCK, FIRST, b"abcdef", offset)], data=b"abcdef"[offset:])
    with pytest.raises(DamagedBytes, match="offset"):
        list(fetching.feed(frame))
    with pytest.raises(DamagedBytes, match="offset"):
        list(Fetching(7, wanted(service), verify=True).feed(frame))


def test_a_fetch_goes_on_so_often_and_not_after_its_end() -> None:
    service = Service([b"abc"], [], frame_bytes=2)
    fetching = Fetching(7, wanted(service), verify=True)
    for _ in range(RESUMPTIONS_MAX):
        assert fetching.may_go_on
        fetching.go_on(anew=False)
    assert not fetching.may_go_on
    ended = Fetching(7, wanted(service), verify=True)
    stream(ended, service, [], frames=None)
    assert not ended.may_go_on


def test_retries_are_a_tenth_of_the_calls_in_the_long_run() -> None:
    budget = RetryBudget()
    retries = 0
    for _ in range(1000):
        left = budget.taken()
        if left is not None:
            retries += 1
            budget = left
        budget = budget.succeeded()
    assert retries == pytest.approx(1000 / 10 + RETRY_TOKENS_MAX, abs=2)
    assert RetryBudget().succeeded().tokens == RETRY_TOKENS_MAX
    assert RetryBudget(0.5).taken() is None
