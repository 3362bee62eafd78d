"""What a caller gets of the events of several workers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.clock import ManualClock
from kvstore.v1 import worker_pb2 as pb
from kvstore_workers.runtime.relay import Leg, Relay, TokensDiffer

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
    return Relay(clock, new_tokens=4)


def _take(relay: Relay, leg: Leg, *events: Event) -> list[Event]:
    return [passed for event in events if (passed := relay.take(leg, event)) is not None]


def test_the_first_prefix_is_passed_on_and_later_ones_are_not(relay: Relay) -> None:
    prefix = Event(kind=Event.PREFIX, prefix=pb.PrefixReport(prompt_tokens=5))
    (passed,) = _take(relay, relay.prefill(), prefix)
    assert passed.prefix.prompt_tokens == 5
    assert _take(relay, relay.decode(0), prefix) == []


def test_the_end_of_a_prefill_is_no_end_for_the_caller_and_keeps_the_ticket(relay: Relay) -> None:
    (passed,) = _take(relay, relay.prefill(), _stored(Event.DONE, 3, ticket=b"t" * 16))
    assert (passed.kind, passed.stored.blocks_stored, passed.ticket) == (Event.STORED, 3, b"")
    assert relay.ticket == b"t" * 16


def test_stored_counts_all_workers(relay: Relay) -> None:
    prefill = relay.prefill()
    _take(relay, prefill, _stored(Event.STORED, 2), _stored(Event.DONE, 3))
    decode = relay.decode(0)
    (passed,) = _take(relay, decode, _stored(Event.STORED, 1))
    assert passed.stored.blocks_stored == 4
    assert _take(relay, decode, _stored(Event.DONE, 2)) == []
    done = relay.done()
    assert (done.kind, done.stored.blocks_stored) == (Event.DONE, 5)


def test_times_are_counted_from_the_caller_s_request(relay: Relay, clock: ManualClock) -> None:
    clock.advance(1.5)
    event = _token(1, first=True)
    event.at_seconds = 0.25
    (passed,) = _take(relay, relay.prefill(), event)
    assert passed.at_seconds == pytest.approx(1.5)
    assert passed.logits == b"x"


@pytest.mark.parametrize("sent", range(4))
def test_a_second_decode_worker_s_tokens_are_sent_from_where_the_first_one_broke_off(
    relay: Relay, sent: int
) -> None:
    _take(relay, relay.prefill(), _token(10, first=True))
    assert len(_take(relay, relay.decode(0), *[_token(token) for token in [11, 12, 13][:sent]])) == sent
    second = relay.decode(0)
    passed = _take(relay, second, *[_token(token) for token in (11, 12, 13)])
    assert [event.token for event in passed] == [11, 12, 13][sent:]
    assert relay.tokens_of(0) == [10, 11, 12, 13]
    assert not relay.lacking


def test_without_a_prefill_the_decode_worker_s_first_token_is_the_first_and_sent_once(relay: Relay) -> None:
    (first,) = _take(relay, relay.decode(0), _token(10, first=True))
    assert first.kind == Event.FIRST_TOKEN
    second = relay.decode(0)
    assert second.has_first
    assert len(_take(relay, second, _token(11))) == 1
    assert relay.tokens_of(0) == [10, 11]


def test_a_second_prefill_worker_s_first_token_is_not_sent_again(relay: Relay) -> None:
    assert len(_take(relay, relay.prefill(), _token(10, first=True))) == 1
    assert _take(relay, relay.prefill(), _token(10, first=True)) == []
    with pytest.raises(TokensDiffer, match="token 0 was sent as 10, and is 11"):
        _take(relay, relay.prefill(), _token(11, first=True))


def test_a_token_that_differs_from_the_one_sent_before_is_not_passed_over(relay: Relay) -> None:
    _take(relay, relay.prefill(), _token(10, first=True))
    _take(relay, relay.decode(0), _token(11))
    with pytest.raises(TokensDiffer, match="token 1 was sent as 11, and is 99"):
        _take(relay, relay.decode(0), _token(99))


# ---- samples ------------------------------------------------------------------------------------------------------


@pytest.fixture
def three(clock: ManualClock) -> Relay:
    """Three samples of two tokens each, the first of each given by a prefill worker."""
    relay = Relay(clock, samples=3, new_tokens=2)
    events = [Event(kind=Event.FIRST_TOKEN, token=10 + sample, sample=sample) for sample in range(3)]
    passed = _take(relay, relay.prefill(), *events)
    assert [(event.token, event.sample) for event in passed] == [(10, 0), (11, 1), (12, 2)]
    return relay


def test_samples_go_on_beside_each_other_and_each_token_names_its_own(three: Relay) -> None:
    legs = [three.decode(sample) for sample in range(3)]
    passed = [_take(three, legs[sample], _token(20 + sample)) for sample in (2, 0)]
    assert [[(event.token, event.sample) for event in events] for events in passed] == [[(22, 2)], [(20, 0)]]
    assert three.lacking == [1]


def test_a_sample_s_second_worker_repeats_that_sample_only(three: Relay) -> None:
    _take(three, three.decode(0), _token(20))
    assert _take(three, three.decode(0), _token(20)) == []
    with pytest.raises(TokensDiffer, match="token 1 of sample 0 was sent as 20, and is 21"):
        _take(three, three.decode(0), _token(21))
    assert len(_take(three, three.decode(1), _token(21))) == 1


def test_a_prefill_that_broke_off_between_first_tokens_goes_on_with_those_that_lack(
    clock: ManualClock,
) -> None:
    relay = Relay(clock, samples=3, new_tokens=2)
    events = [Event(kind=Event.FIRST_TOKEN, token=10 + sample, sample=sample) for sample in range(3)]
    _take(relay, relay.prefill(), *events[:2])
    assert [event.sample for event in _take(relay, relay.prefill(), *events)] == [2]
    assert [relay.decode(sample).has_first for sample in range(3)] == [True, True, True]


def test_done_counts_what_the_workers_of_all_samples_stored(three: Relay) -> None:
    for sample in range(3):
        assert _take(three, three.decode(sample), _stored(Event.DONE, 1 + sample)) == []
    assert three.done().stored.blocks_stored == 6


@given(
    prefills=st.lists(st.integers(0, 3), max_size=3),
    cuts=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), max_size=12),
)
def test_wherever_workers_break_off_each_token_of_each_sample_is_sent_once_and_in_order(
    prefills: list[int], cuts: list[tuple[int, int]]
) -> None:
    """prefills: how many first tokens each prefill worker gave. cuts: a decode worker's sample, and how many tokens of it
    it gave. Then each sample gets a worker that runs through."""
    relay = Relay(ManualClock(), samples=3, new_tokens=4)
    truth = [[100 * sample + place for place in range(4)] for sample in range(3)]
    sent: list[Event] = []
    for count in prefills:
        events = [
            Event(kind=Event.FIRST_TOKEN, token=truth[sample][0], sample=sample) for sample in range(count)
        ]
        sent += _take(relay, relay.prefill(), *events)
    for sample, count in [*cuts, (0, 4), (1, 4), (2, 4)]:
        leg = relay.decode(sample)
        rest = truth[sample][leg.has_first :]
        sent += _take(relay, leg, *[_token(token) for token in rest[:count]])
    assert relay.lacking == []
    for sample in range(3):
        assert [event.token for event in sent if event.sample == sample] == truth[sample]


# ---- spans --------------------------------------------------------------------------------------------------------


def _spanned(kind: Event.Kind, *names: str) -> Event:
    return Event(kind=kind, spans=[pb.Span(name=name, track="compute") for name in names])


def test_no_worker_s_span_is_lost_and_none_comes_twice(relay: Relay) -> None:
    prefill = relay.prefill()
    sent = _take(relay, prefill, _spanned(Event.PREFIX, "lookup"), _token(10, first=True))
    relay.add_span(pb.Span(name="wait", track="gateway"))
    sent += _take(relay, prefill, _spanned(Event.DONE, "compute"))
    decode = relay.decode(0)
    sent += _take(relay, decode, _spanned(Event.PREFIX, "take"), _token(11))
    sent += _take(relay, decode, _spanned(Event.STORED))
    sent += _take(relay, decode, _spanned(Event.DONE, "decode"))
    sent.append(relay.done())
    kinds = {span.name: event.kind for event in sent for span in event.spans}
    assert kinds == {
        "lookup": Event.PREFIX,
        "wait": Event.STORED,
        "compute": Event.STORED,
        "take": Event.STORED,
        "decode": Event.DONE,
    }
    assert sum(len(event.spans) for event in sent) == len(kinds)
