"""Engines on a real service: whatever way a prompt's state comes back, the tokens and their logits are the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.types import Lineage, StateSource
from kvstore_client import CacheClient, Costs
from kvstore_workers.runtime.engine import Engine
from kvstore_workers.runtime.stop import Stop, Stopped
from kvstore_workers.runtime.values import Computed, Prefixed
from tests.support.long import long
from tests.support.service import ServiceProcess, running_service
from tests.support.workers import (
    COMPUTING_PAYS,
    RESTORING_PAYS,
    cold,
    decode,
    engine_on,
    fresh_engine,
    prefill,
    request_of,
    tiny_model,
    tokens_of,
)

B = 32


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceProcess]:
    with running_service(prompt_tokens=16_384) as service:
        yield service


def _left_open(admin: CacheClient) -> dict[str, float]:
    return {
        name: value
        for name, value in admin.stats().items()
        if name in ("leases", "reservations", "handoff_takes_out")
    }


def test_prices_that_a_decode_worker_makes_up_are_not_remembered(
    service: ServiceProcess, admin: CacheClient, salt: str
) -> None:
    prompt = tokens_of(100, seed=9)
    with fresh_engine(service.directory, salt=salt, costs=RESTORING_PAYS) as engine:
        first = prefill(engine, request_of(prompt, 4))
        rest = decode(engine, request_of(prompt, 4), ticket=first.ticket, first_token=first.tokens[0])
        assert rest.report.handoff
        probe = admin.lookup(engine.namespace, [], prompt_tokens=100, lease=False)
    assert probe.costs.seconds_per_ssd_byte == RESTORING_PAYS.seconds_per_ssd_byte
    assert probe.costs.seconds_per_fetch == RESTORING_PAYS.seconds_per_fetch


# ---- ways back ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("new", [1, 25])
@pytest.mark.parametrize(
    "way",
    [
        (None, RESTORING_PAYS, StateSource.POOL),
        ("pool", RESTORING_PAYS, StateSource.CHECKPOINT),
        ("both", RESTORING_PAYS, StateSource.REPLAY),
        (None, COMPUTING_PAYS, StateSource.NONE),
    ],
    ids=lambda way: way[2],
)
def test_a_second_turn_gives_the_bits_of_a_cold_run_from_every_source(
    service: ServiceProcess,
    admin: CacheClient,
    salt: str,
    way: tuple[str | None, Costs, StateSource],
    new: int,
) -> None:
    drop, costs, source = way
    history = tokens_of(1000, seed=1)
    with fresh_engine(service.directory, salt=salt, costs=costs) as engine:
        first = decode(engine, request_of(history, new))
        assert first.same == cold(history, new).same
        assert first.stored.failure == ""
        assert first.stored.blocks_stored == (1000 + new - 1) // B
        history += first.tokens + tokens_of(50, seed=2)
        if drop is not None:
            assert admin.drop_states(engine.namespace, drop).kept == 0  # type: ignore[arg-type]
        second = decode(engine, request_of(history, new))
    assert second.same == cold(history, new).same
    report = second.report
    assert report.state_source is source
    assert report.miss_reason == ""
    restored = 0 if source is StateSource.NONE else (1000 + new - 1) // B * B
    assert (report.restored_tokens, report.computed_tokens) == (restored, len(history) - restored)
    assert report.replayed_tokens == (75 if source is StateSource.REPLAY else 0)
    assert _left_open(admin) == {"leases": 0, "reservations": 0, "handoff_takes_out": 0}


@pytest.mark.parametrize(
    "policy", ["zero", "endpoints", "periodic:96", "full", long("periodic:64"), long("full+overlap")]
)
def test_five_turns_of_a_session_give_the_bits_of_cold_runs(
    service: ServiceProcess, admin: CacheClient, salt: str, policy: str
) -> None:
    history = tokens_of(70, seed=3)
    restored = []
    with fresh_engine(service.directory, salt=salt, policy=policy) as engine:
        for turn in range(5):
            if turn % 2:
                admin.drop_states(engine.namespace, "pool")
            answer = decode(engine, request_of(history, 30))
            assert answer.same == cold(history, 30).same, f"turn {turn}"
            assert answer.stored.failure == ""
            restored.append(answer.report.restored_tokens)
            history += answer.tokens + tokens_of(45, seed=100 + turn)
    # What a turn computed, output included, the next one has: all whole blocks but for the token that was not computed.
    assert restored == [0, *[(70 + 75 * turn + 29) // B * B for turn in range(4)]]


def test_periodic_states_of_the_output_are_kept_on_ssd(
    service: ServiceProcess, admin: CacheClient, salt: str
) -> None:
    prompt = tokens_of(40, seed=4)
    with fresh_engine(service.directory, salt=salt, policy="periodic:64") as engine:
        answer = decode(engine, request_of(prompt, 200))
        assert answer.stored.failure == ""
        # SSD: 64, 128, 192 of the output; pool: 32 of the prompt, 224 as the output's last edge.
        assert answer.stored.states_stored == 5
        admin.drop_states(engine.namespace, "pool")
        longer = decode(engine, request_of(prompt + answer.tokens[:160], 2))
    assert longer.report.state_source is StateSource.CHECKPOINT
    assert longer.report.restored_tokens == 192
    assert longer.same == cold(prompt + answer.tokens[:160], 2).same


@pytest.mark.parametrize(("count", "new"), [(128, 1), (70, 59), (128, 65)])
def test_a_run_that_ends_at_an_edge_whose_state_is_wanted_in_both_tiers_is_stored_whole(
    service: ServiceProcess, admin: CacheClient, salt: str, count: int, new: int
) -> None:
    prompt, end = tokens_of(count, seed=6), count + new - 1
    with fresh_engine(service.directory, salt=salt, policy="periodic:64") as engine:
        answer = decode(engine, request_of(prompt, new))
        assert answer.stored.failure == ""
        assert (answer.stored.blocks_stored, answer.stored.blocks_failed) == (end // B, 0)
        longer = prompt + answer.tokens
        for source, dropped in ((StateSource.POOL, "pool"), (StateSource.CHECKPOINT, "ssd")):
            report = decode(engine, request_of(longer, 1)).report
            assert (report.state_source, report.restored_tokens) == (source, end)
            admin.drop_states(engine.namespace, dropped)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 256])
def test_a_prompt_at_a_block_edge_always_leaves_a_token_to_compute(
    service: ServiceProcess, salt: str, count: int
) -> None:
    prompt = tokens_of(count, seed=count)
    expected = cold(prompt, 3).same
    with fresh_engine(service.directory, salt=salt) as engine:
        for turn in range(3):
            answer = decode(engine, request_of(prompt, 3))
            assert answer.same == expected
            assert answer.report.restored_tokens == ((count - 1) // B * B if turn else 0)
        longer = prompt + tokens_of(64, seed=9)
        answer = decode(engine, request_of(longer, 3))
    assert answer.report.restored_tokens == count // B * B
    assert answer.same == cold(longer, 3).same


def test_a_sampled_run_gives_the_same_tokens_restored_and_cold(service: ServiceProcess, salt: str) -> None:
    prompt = tokens_of(100, seed=5)
    sampling = {"temperature": 1.3, "seed": 42}
    expected = cold(prompt, 20, **sampling)
    with fresh_engine(service.directory, salt=salt) as engine:
        for _ in range(2):
            answer = decode(engine, request_of(prompt, 20, **sampling))
            assert answer.same == expected.same
    assert answer.report.restored_tokens == 96
    assert expected.tokens != cold(prompt, 20, temperature=1.3, seed=43).tokens


def without_time(figures: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in figures.items() if not name.startswith(("uptime", "loop_gap"))}


def test_a_bypass_neither_reads_nor_writes_the_store(
    service: ServiceProcess, admin: CacheClient, salt: str
) -> None:
    prompt = tokens_of(200, seed=6)
    with fresh_engine(service.directory, salt=salt) as engine:
        before = admin.stats()
        answer = decode(engine, request_of(prompt, 3, bypass_store=True))
        handed = prefill(engine, request_of(prompt, 3, bypass_store=True))
        after = admin.stats()
        assert engine.namespace == b"", "the namespace was opened"
    assert answer.same == cold(prompt, 3).same
    assert handed.tokens == answer.tokens[:1]
    assert handed.ticket == b""
    assert (answer.stored, handed.stored) == (type(answer.stored)(), type(answer.stored)())
    assert without_time(before) == without_time(after)


def test_blocks_that_are_held_are_counted_and_not_stored_again(service: ServiceProcess, salt: str) -> None:
    prompt = tokens_of(320, seed=7)
    with fresh_engine(service.directory, salt=salt, costs=COMPUTING_PAYS) as engine:
        assert decode(engine, request_of(prompt, 1)).stored.blocks_stored == 10
        again = decode(engine, request_of(prompt, 1)).stored
    assert (again.blocks_stored, again.blocks_held_already, again.bytes_stored) == (0, 10, 0)


def test_tenants_do_not_see_each_other_s_blocks(service: ServiceProcess, salt: str) -> None:
    prompt = tokens_of(320, seed=8)
    with (
        fresh_engine(service.directory, salt=salt + "-a") as one,
        fresh_engine(service.directory, salt=salt + "-b") as other,
    ):
        decode(one, request_of(prompt, 1))
        assert decode(other, request_of(prompt, 1)).report.restored_tokens == 0
        assert decode(one, request_of(prompt, 1)).report.restored_tokens == 288


# ---- handoffs -----------------------------------------------------------------------------------------------------


@pytest.fixture
def pair(service: ServiceProcess, salt: str) -> Iterator[tuple[Engine, Engine]]:
    """A prefill and a decode engine of one namespace, each with its own session."""
    with (
        fresh_engine(service.directory, salt=salt) as one,
        fresh_engine(service.directory, salt=salt) as other,
    ):
        yield one, other


# What a state is at each position is the model's own promise (tests/model).
AT_EDGES = [1, 2, B - 1, B, B + 1, B + 17, 2 * B - 1, 2 * B, 2 * B + 1, 3 * B]


@pytest.mark.parametrize(
    "counts", [AT_EDGES, *(long(range(first, first + B)) for first in (1, B + 1, 2 * B + 1))]
)
def test_a_handoff_at_any_position_of_three_blocks_goes_on_as_a_cold_run(
    pair: tuple[Engine, Engine], admin: CacheClient, counts: Iterable[int]
) -> None:
    for count in counts:
        prompt = tokens_of(count, seed=1000 + count)
        handed = prefill(pair[0], request_of(prompt, 3))
        answer = decode(pair[1], request_of(prompt, 3), ticket=handed.ticket, first_token=handed.tokens[0])
        assert answer.report.handoff, f"{count}: {answer.report.miss_reason}"
        assert answer.report.restored_tokens == count
        expected = cold(prompt, 3)
        assert (handed.tokens + answer.tokens, handed.logits + answer.logits) == expected.same, (
            f"{count} tokens"
        )
        assert answer.stored.failure == ""
    assert _left_open(admin) == {"leases": 0, "reservations": 0, "handoff_takes_out": 0}


@pytest.mark.parametrize("count", [60, 64, 70, 95, 96])
def test_what_a_decode_worker_computes_after_a_handoff_is_there_for_the_next_turn(
    pair: tuple[Engine, Engine], count: int
) -> None:
    prompt = tokens_of(count, seed=2000 + count)
    handed = prefill(pair[0], request_of(prompt, 50))
    answer = decode(pair[1], request_of(prompt, 50), ticket=handed.ticket, first_token=handed.tokens[0])
    assert answer.report.handoff
    longer = prompt + handed.tokens + answer.tokens + tokens_of(20, seed=10)
    following = prefill(pair[0], request_of(longer, 1))
    assert following.same == cold(longer, 1).same
    assert following.report.restored_tokens == (count + 49) // B * B
    assert following.report.state_source is StateSource.POOL


def _other_prompt(pair: tuple[Engine, Engine], prompt: list[int]) -> bytes:
    return prefill(pair[0], request_of(tokens_of(len(prompt), seed=77), 5)).ticket


def _spent(pair: tuple[Engine, Engine], prompt: list[int]) -> bytes:
    handed = prefill(pair[0], request_of(prompt, 5))
    decode(pair[1], request_of(prompt, 5), ticket=handed.ticket, first_token=handed.tokens[0])
    return handed.ticket


@pytest.mark.parametrize("ticket_of", [_other_prompt, _spent, lambda pair, prompt: bytes(16)])
def test_a_ticket_that_gives_nothing_costs_a_lookup_and_no_token(
    pair: tuple[Engine, Engine], ticket_of: object
) -> None:
    prompt = tokens_of(100, seed=11)
    expected = cold(prompt, 5)
    assert callable(ticket_of)
    ticket = ticket_of(pair, prompt)
    answer = decode(pair[1], request_of(prompt, 5), ticket=ticket, first_token=expected.tokens[0])
    assert not answer.report.handoff
    assert answer.report.miss_reason
    assert answer.same == (expected.tokens[1:], expected.logits[1:])


@pytest.mark.parametrize("count", [20, 96, 100])
def test_a_ticket_of_another_prompt_as_long_and_with_the_same_first_token_is_not_used(
    pair: tuple[Engine, Engine], count: int
) -> None:
    other = prefill(pair[0], request_of(tokens_of(count, seed=78), 5))
    prompt, first = tokens_of(count, seed=79), other.tokens[0]
    # Both in the store, so that nothing but the ticket is wrong.
    prefill(pair[0], request_of(prompt, 5))
    expected = decode(pair[1], request_of(prompt, 5, bypass_store=True), first_token=first)
    answer = decode(pair[1], request_of(prompt, 5), ticket=other.ticket, first_token=first)
    assert "belongs to another request" in answer.report.miss_reason
    assert answer.same == expected.same


def test_an_approximate_handoff_is_not_used(pair: tuple[Engine, Engine], admin: CacheClient) -> None:
    prompt = tokens_of(100, seed=13)
    handed = prefill(pair[0], request_of(prompt, 5))
    take = admin.take_handoff(pair[0].namespace, handed.ticket)
    ticket = admin.put_handoff(
        pair[0].namespace,
        position=take.position,
        payload=take.payload,
        note=take.note,
        lineage=Lineage.BOUNDED,
    )
    answer = decode(pair[1], request_of(prompt, 5), ticket=ticket, first_token=handed.tokens[0])
    assert "approximate" in answer.report.miss_reason
    assert answer.same == (cold(prompt, 5).tokens[1:], cold(prompt, 5).logits[1:])


def test_a_handoff_whose_blocks_are_gone_falls_back(pair: tuple[Engine, Engine], admin: CacheClient) -> None:
    prompt = tokens_of(100, seed=12)
    handed = prefill(pair[0], request_of(prompt, 5))
    admin.clear(pair[0].namespace)
    # A clear may take handoffs with it; either way nothing of the prompt is left.
    answer = decode(pair[1], request_of(prompt, 5), ticket=handed.ticket, first_token=handed.tokens[0])
    expected = cold(prompt, 5)
    assert not answer.report.handoff
    assert answer.report.restored_tokens == 0
    assert answer.same == (expected.tokens[1:], expected.logits[1:])


def test_a_single_token_needs_no_handoff(pair: tuple[Engine, Engine]) -> None:
    answer = prefill(pair[0], request_of(tokens_of(100, seed=13), 1))
    assert answer.ticket == b""
    assert len(answer.tokens) == 1


def test_no_other_request_waits_while_this_one_leaves_its_handoff(service: ServiceProcess, salt: str) -> None:
    class Watched(CacheClient):
        left = 0

        def put_handoff(self, *args: Any, **kwargs: Any) -> bytes:
            self.left += 1
            return super().put_handoff(*args, **kwargs)

    client = Watched(service.directory, owner="test")
    with engine_on(client, salt=salt) as engine:
        *_, last = engine.prefill(request_of(tokens_of(100, seed=18), 5), stop=Stop())
        assert isinstance(last, Computed)
        assert client.left == 0
        assert last.done().ticket
        assert client.left == 1


# ---- giving up ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 4, *(long(steps) for steps in (2, 3, 5, 6, 7))])
def test_a_request_that_is_given_up_leaves_nothing_open(
    service: ServiceProcess, admin: CacheClient, salt: str, steps: int
) -> None:
    prompt = tokens_of(1500, seed=14)
    with fresh_engine(service.directory, salt=salt) as engine:
        for _ in range(2):
            stop = Stop()
            events = engine.decode(request_of(prompt, 20), stop=stop)
            for _ in range(steps):
                next(events)
            stop.set()
            with pytest.raises(Stopped):
                list(events)
        answer = decode(engine, request_of(prompt, 3))
        assert answer.same == cold(prompt, 3).same
        assert _left_open(admin) == {"leases": 0, "reservations": 0, "handoff_takes_out": 0}


def test_a_stop_between_two_blocks_of_a_fetch_gives_the_lease_back(
    service: ServiceProcess, admin: CacheClient, salt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tokens_of(1500, seed=15)
    with fresh_engine(service.directory, salt=salt) as engine:
        decode(engine, request_of(prompt, 1))
        stop = Stop()
        checks = 0

        def check() -> None:
            nonlocal checks
            checks += 1
            if checks == 5:
                raise Stopped

        monkeypatch.setattr(stop, "check", check)
        with pytest.raises(Stopped):
            list(engine.decode(request_of(prompt, 1), stop=stop))
        assert _left_open(admin) == {"leases": 0, "reservations": 0, "handoff_takes_out": 0}


def test_closing_the_events_early_leaves_the_engine_usable(service: ServiceProcess, salt: str) -> None:
    prompt = tokens_of(300, seed=16)
    with fresh_engine(service.directory, salt=salt) as engine:
        events = engine.decode(request_of(prompt, 20), stop=Stop())
        assert isinstance(next(events), Prefixed)
        events.close()
        assert decode(engine, request_of(prompt, 3)).same == cold(prompt, 3).same


def test_a_store_that_was_never_there_costs_nothing_but_the_restore(tmp_path: Path) -> None:
    prompt = tokens_of(100, seed=17)
    with fresh_engine(tmp_path / "nowhere", salt="x") as engine:
        handed = prefill(engine, request_of(prompt, 5))
        answer = decode(engine, request_of(prompt, 5))
    assert answer.same == cold(prompt, 5).same
    assert handed.tokens == answer.tokens[:1]
    assert handed.ticket == b""
    assert answer.report.miss_reason.startswith("UNAVAILABLE")
    assert answer.stored.blocks_stored == 0
    assert answer.stored.blocks_failed == 3
    assert answer.stored.failure.startswith("UNAVAILABLE")
    assert tiny_model().profile.block_tokens == B
