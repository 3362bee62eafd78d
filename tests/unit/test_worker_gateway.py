"""What a caller gets of the events of several workers."""

from __future__ import annotations

import pytest

from kvstore.clock import ManualClock
from kvstore.v1 import worker_pb2 as pb
from kvstore_workers.runtime.gateway import Relay, TokensDiffer

Event = pb.GenerateEvent


def _token(token: int, *, first: bool = False) -> Event:
    return Event(kind=Event.FIRST_TOKEN if first else Event.TOKEN, token=token, logits=b"x")


def _stored(kind: Event.Kind, blocks: int, *, ticket: bytes = b"") -> Event:
    return Event(kind=kind, stored=pb.StoreReport(blocks_stored=blocks), ticket=ticket)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def relay(clock: ManualClock) -> Relay:
    relay = Relay(clock)
    relay.begin_worker()
    return relay


def test_the_first_prefix_is_passed_on_and_later_ones_are_not(relay: Relay) -> None:
    prefix = Event(kind=Event.PREFIX, prefix=pb.PrefixReport(prompt_tokens=5))
    passed = relay.prefill(prefix)
    assert passed is not None
    assert passed.prefix.prompt_tokens == 5
    assert relay.decode(prefix, has_first=True) is None


def test_the_end_of_a_prefill_is_no_end_for_the_caller_and_keeps_the_ticket(relay: Relay) -> None:
    passed = relay.prefill(_stored(Event.DONE, 3, ticket=b"t" * 16))
    assert passed is not None
    assert (passed.kind, passed.stored.blocks_stored, passed.ticket) == (Event.STORED, 3, b"")
    assert relay.ticket == b"t" * 16


def test_stored_counts_both_workers(relay: Relay) -> None:
    relay.prefill(_stored(Event.STORED, 2))
    relay.prefill(_stored(Event.DONE, 3))
    relay.begin_worker()
    passed = relay.decode(_stored(Event.STORED, 1), has_first=True)
    assert passed is not None
    assert passed.stored.blocks_stored == 4
    done = relay.decode(_stored(Event.DONE, 2), has_first=True)
    assert done is not None
    assert (done.kind, done.stored.blocks_stored) == (Event.DONE, 5)


def test_times_are_counted_from_the_caller_s_request(relay: Relay, clock: ManualClock) -> None:
    clock.advance(1.5)
    event = _token(1, first=True)
    event.at_seconds = 0.25
    passed = relay.prefill(event)
    assert passed is not None
    assert passed.at_seconds == pytest.approx(1.5)
    assert passed.logits == b"x"


@pytest.mark.parametrize("sent", range(4))
def test_a_second_decode_worker_s_tokens_are_sent_from_where_the_first_one_broke_off(
    relay: Relay, sent: int
) -> None:
    relay.prefill(_token(10, first=True))
    relay.begin_worker()
    for token in [11, 12, 13][:sent]:
        assert relay.decode(_token(token), has_first=True) is not None
    relay.begin_worker()
    passed = [relay.decode(_token(token), has_first=True) for token in (11, 12, 13)]
    assert [event.token for event in passed if event] == [11, 12, 13][sent:]
    assert relay.tokens == [10, 11, 12, 13]


def test_without_a_prefill_the_decode_worker_s_first_token_is_the_first_and_sent_once(relay: Relay) -> None:
    first = relay.decode(_token(10, first=True), has_first=False)
    assert first is not None
    assert first.kind == Event.FIRST_TOKEN
    relay.begin_worker()
    assert relay.decode(_token(11), has_first=True) is not None
    assert relay.tokens == [10, 11]


def test_a_token_that_differs_from_the_one_sent_before_is_not_passed_over(relay: Relay) -> None:
    relay.prefill(_token(10, first=True))
    relay.begin_worker()
    relay.decode(_token(11), has_first=True)
    relay.begin_worker()
    with pytest.raises(TokensDiffer, match="token 1 was sent as 11, and is 99"):
        relay.decode(_token(99), has_first=True)
