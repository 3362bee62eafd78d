"""Every window-state policy on a real service: what it keeps, where a resume comes from, and that no bit depends on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore.types import Exactness, StateSource
from kvstore_client import CacheClient
from kvstore_workers.runtime.engine import Engine
from tests.support.service import ServiceProcess, running_service
from tests.support.workers import (
    Answer,
    cold,
    decode,
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


def _asked(engine: Engine, tokens: list[int], new: int = 4, **changes: object) -> Answer:
    """An answer that must be a cold run's, whatever it came from."""
    answer = decode(engine, request_of(tokens, new, **changes))
    assert answer.same == cold(tokens, new).same
    assert answer.stored.failure == ""
    assert answer.report.miss_reason == ""
    return answer


# ---- full ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "replayed"), [("full", 4), ("full+overlap", 0)])
def test_full_resumes_from_rows_and_not_from_a_checkpoint(
    service: ServiceProcess, admin: CacheClient, salt: str, policy: str, replayed: int
) -> None:
    profile = tiny_model().profile
    rows_bytes = profile.rows_block_bytes if policy == "full" else profile.rows_overlap_block_bytes
    history = tokens_of(500, seed=21)
    with fresh_engine(service.directory, salt=salt, policy=policy) as engine:
        before = admin.stats()
        first = _asked(engine, history, 40)
        after = admin.stats()
        # Every block has its rows, and no state went to SSD.
        assert first.stored.rows_stored == first.stored.blocks_stored == (500 + 39) // B
        assert after["rows_ssd"] - before["rows_ssd"] == first.stored.rows_stored
        assert after["states_ssd"] - before["states_ssd"] == first.stored.rows_stored
        history += first.tokens + tokens_of(30, seed=22)
        admin.drop_states(engine.namespace, "pool")
        second = _asked(engine, history)
    edge = (500 + 39) // B * B
    report = second.report
    assert report.state_source is StateSource.ROWS
    assert (report.restored_tokens, report.replayed_tokens) == (edge, replayed)
    assert report.bytes_ssd == edge // B * profile.block_bytes + rows_bytes


@pytest.mark.parametrize("count", [300, 305, 319, 320, 321])
def test_a_block_that_a_decode_worker_completes_has_its_rows_too(
    service: ServiceProcess, admin: CacheClient, salt: str, count: int
) -> None:
    prompt = tokens_of(count, seed=44)
    with fresh_engine(service.directory, salt=salt, policy="full") as engine:
        first = prefill(engine, request_of(prompt, 50))
        rest = decode(engine, request_of(prompt, 50), ticket=first.ticket, first_token=first.tokens[0])
        assert rest.report.handoff
        assert rest.stored.rows_stored == rest.stored.blocks_stored == (count + 49) // B - count // B
        admin.drop_states(engine.namespace, "pool")
        history = prompt + first.tokens + rest.tokens + tokens_of(5, seed=45)
        answer = _asked(engine, history)
    assert answer.report.state_source is StateSource.ROWS
    assert (answer.report.restored_tokens, answer.report.replayed_tokens) == ((count + 49) // B * B, 4)


@pytest.mark.parametrize("policy", ["full", "full+overlap"])
@pytest.mark.parametrize("edge", [B, 2 * B, 9 * B])
def test_rows_serve_every_edge_of_a_prompt(
    service: ServiceProcess, admin: CacheClient, salt: str, policy: str, edge: int
) -> None:
    history = tokens_of(10 * B + 5, seed=23)
    with fresh_engine(service.directory, salt=salt, policy=policy) as engine:
        _asked(engine, history, 1)
        admin.drop_states(engine.namespace, "pool")
        branch = _asked(engine, history[:edge] + tokens_of(20, seed=24))
    assert branch.report.restored_tokens == edge
    assert branch.report.state_source is StateSource.ROWS


def test_a_policy_changed_while_running_counts_from_the_next_request_on(
    service: ServiceProcess, admin: CacheClient, salt: str
) -> None:
    history = tokens_of(300, seed=25)
    sources = []
    with fresh_engine(service.directory, salt=salt, policy="endpoints") as engine:
        for turn, policy in enumerate(
            ("endpoints", "full", "periodic:64", "zero", "full+overlap", "endpoints")
        ):
            admin.set_policy(engine.namespace or _opened(engine), policy)
            answer = _asked(engine, history, 40)
            sources.append(answer.report.state_source)
            history += answer.tokens + tokens_of(40, seed=100 + turn)
            admin.drop_states(engine.namespace, "pool")
    assert sources == [
        StateSource.NONE,
        StateSource.CHECKPOINT,
        StateSource.ROWS,
        StateSource.CHECKPOINT,
        StateSource.REPLAY,
        StateSource.ROWS,
    ]


def _opened(engine: Engine) -> bytes:
    """Make the namespace known, as the first request would."""
    store = engine.store
    assert store is not None
    store.open()
    return store.namespace


# ---- endpoints ------------------------------------------------------------------------------------------------------


def test_endpoints_keeps_the_state_of_a_branch_point_once_a_second_prompt_leaves_there(
    service: ServiceProcess, admin: CacheClient, salt: str
) -> None:
    shared = tokens_of(10 * B, seed=26)
    with fresh_engine(service.directory, salt=salt, policy="endpoints") as engine:
        _asked(engine, shared + tokens_of(5 * B, seed=27), 1)
        admin.drop_states(engine.namespace, "both")
        # The first to leave has to rebuild the state at the branch, and keeps it.
        second = _asked(engine, shared + tokens_of(5 * B, seed=28), 1)
        admin.drop_states(engine.namespace, "pool")
        third = _asked(engine, shared + tokens_of(5 * B, seed=29), 1)
    assert second.report.state_source is StateSource.REPLAY
    assert third.report.state_source is StateSource.CHECKPOINT
    assert (third.report.restored_tokens, third.report.replayed_tokens) == (10 * B, 0)


# ---- bounded --------------------------------------------------------------------------------------------------------


def test_a_bounded_turn_leaves_nothing_that_an_exact_request_uses(
    service: ServiceProcess, admin: CacheClient, salt: str
) -> None:
    history = tokens_of(600, seed=31)
    with fresh_engine(service.directory, salt=salt, policy="endpoints") as engine:
        _asked(engine, history, 1)
        admin.drop_states(engine.namespace, "both")
        longer = history + tokens_of(200, seed=32)
        bounded = decode(engine, request_of(longer, 40, exactness=Exactness.BOUNDED))
        assert bounded.report.exactness is Exactness.BOUNDED
        assert bounded.report.state_source is StateSource.REPLAY
        assert bounded.report.replayed_tokens == tiny_model().profile.bounded_replay_tokens
        assert bounded.stored.failure == ""

        # Bounded requests go on from what a bounded one has left, and say so.
        again = decode(engine, request_of(longer, 4, exactness=Exactness.BOUNDED))
        assert again.report.exactness is Exactness.BOUNDED
        assert again.report.state_source is StateSource.POOL
        assert again.report.restored_tokens == 799 // B * B

        # An exact one uses the exact part only, and its answer is that of a cold run.
        exact = _asked(engine, longer, 40)
        assert exact.report.exactness is Exactness.EXACT
        assert exact.report.restored_tokens == 600 // B * B
        assert exact.stored.blocks_stored > 0

        # It has replaced what was approximate: the next exact request hits.
        admin.drop_states(engine.namespace, "pool")
        hit = _asked(engine, longer + exact.tokens + tokens_of(10, seed=33))
        assert hit.report.state_source is StateSource.CHECKPOINT
        assert hit.report.restored_tokens == (800 + 39) // B * B
        # What is left are the tokens that only the bounded run generated.
        assert admin.stats()["bounded_blocks"] == 1


def test_nothing_is_approximate_unless_it_was_asked_for(
    service: ServiceProcess, admin: CacheClient, salt: str
) -> None:
    history = tokens_of(400, seed=34)
    with fresh_engine(service.directory, salt=salt) as engine:
        _asked(engine, history, 1)
        admin.drop_states(engine.namespace, "both")
        answer = _asked(engine, history + tokens_of(50, seed=35))
    assert answer.report.exactness is Exactness.EXACT
    assert answer.report.replayed_tokens == 75


def test_a_bounded_handoff_is_taken_by_bounded_requests_only(
    service: ServiceProcess, admin: CacheClient, salt: str
) -> None:
    history = tokens_of(300, seed=36)
    longer = history + tokens_of(50, seed=37)
    with fresh_engine(service.directory, salt=salt) as engine:
        _asked(engine, history, 1)
        admin.drop_states(engine.namespace, "both")
        first = prefill(engine, request_of(longer, 20, exactness=Exactness.BOUNDED))
        assert first.report.exactness is Exactness.BOUNDED
        refused = decode(engine, request_of(longer, 20), ticket=first.ticket, first_token=first.tokens[0])
        assert not refused.report.handoff
        assert "approximate" in refused.report.miss_reason
        assert refused.report.exactness is Exactness.EXACT

        admin.drop_states(engine.namespace, "both")
        again = prefill(engine, request_of(longer, 20, exactness=Exactness.BOUNDED))
        taken = decode(
            engine,
            request_of(longer, 20, exactness=Exactness.BOUNDED),
            ticket=again.ticket,
            first_token=again.tokens[0],
        )
        assert taken.report.handoff
        assert taken.report.exactness is again.report.exactness


# ---- samples --------------------------------------------------------------------------------------------------------


def test_several_samples_go_on_from_one_handoff_and_each_is_its_own_cold_run(
    service: ServiceProcess, admin: CacheClient, salt: str
) -> None:
    prompt = tokens_of(200, seed=41)
    with fresh_engine(service.directory, salt=salt) as engine:
        asked = {"temperature": 0.9, "seed": 7, "samples": 3}
        first = prefill(engine, request_of(prompt, 12, **asked))
        assert len(first.tokens) == 3
        for sample in range(3):
            rest = decode(
                engine,
                request_of(prompt, 12, **asked, sample=sample),
                ticket=first.ticket,
                first_token=first.tokens[sample],
            )
            assert rest.report.handoff, rest.report.miss_reason
            alone = cold(prompt, 12, temperature=0.9, seed=7 + sample)
            assert [first.tokens[sample], *rest.tokens] == alone.tokens
            assert [first.logits[sample], *rest.logits] == alone.logits
        spent = decode(
            engine, request_of(prompt, 12, **asked), ticket=first.ticket, first_token=first.tokens[0]
        )
        assert not spent.report.handoff
        assert "takes of this ticket are used up" in spent.report.miss_reason
        assert admin.stats()["handoff_takes_out"] == 0
