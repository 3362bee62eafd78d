"""Window rows of whole blocks: what they hold, where they are to be had, and what does not fit refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.errors import InvalidArgument
from kvstore.profile.layout import rows_layout, rows_needed, state_layout
from kvstore_workers.model import Model, RowsStart, Sequence, StateStart
from tests.support.schedules import FLASH, SCHEDULES, Run, Schedule, csa, hca


@pytest.fixture(scope="module", params=["window, csa", "a window of several blocks", "flash formats"])
def run(request: pytest.FixtureRequest) -> Run:
    return Run(SCHEDULES[request.param], seed=5)


def test_rows_of_blocks_in_a_row_hold_the_window_and_overlap_of_the_state_at_their_end(run: Run) -> None:
    layout, profile = rows_layout(run.profile, overlap=True), run.profile
    for edge in run.edges:
        if edge < profile.window_rows:
            continue
        start = run.rows_start(edge, overlap=True)
        for section in state_layout(profile, edge).sections:
            stored = layout.find(section.part, section.layer, section.field)
            joined = b"".join(payload[stored.offset : stored.end] for payload in start.payloads)
            state = run.kept.states[edge][section.offset : section.end]
            assert joined[-len(state) :] == state, f"{section.part} of layer {section.layer} at {edge}"


def test_rows_without_the_overlap_are_the_first_bytes_of_rows_with_it(run: Run) -> None:
    for edge in run.edges:
        plain, whole = run.kept.rows[edge, False], run.kept.rows[edge, True]
        assert plain is not None
        assert whole is not None
        assert len(plain) == run.profile.rows_block_bytes
        assert len(whole) == run.profile.rows_overlap_block_bytes
        assert whole[: len(plain)] == plain


def test_rows_stored_with_the_overlap_serve_a_resume_that_does_not_use_it(run: Run) -> None:
    edge = run.edges[-2]
    needed = rows_needed(run.profile, edge, overlap=False)
    payloads = [
        run.kept.rows[(block + 1) * run.profile.block_tokens, block % 2 == 0]
        for block in range(needed.first_block, needed.first_block + needed.blocks)
    ]
    assert None not in payloads
    start = RowsStart(payloads, edge, overlap=False)  # type: ignore[arg-type]
    run.check(_restored(run, start, edge), edge)


def test_a_resume_from_rows_has_the_rows_of_every_later_block(run: Run) -> None:
    edge = run.edges[1]
    restored = _restored(run, run.rows_start(edge, overlap=True), edge)
    run.check(restored, edge, after=3 * run.profile.block_tokens)


def test_a_sequence_resumed_inside_a_block_has_rows_only_if_the_window_reaches_to_its_start() -> None:
    small, large = Run(SCHEDULES["window, csa"], seed=6), Run(SCHEDULES["a window of several blocks"], seed=6)
    for run, has_rows in ((small, False), (large, True)):
        position = 2 * run.profile.block_tokens + 20
        origin = run.model.start()
        run.model.extend(origin, run.tokens[:position], logits="none")
        restored = run.model.restore(
            position=position,
            start=StateStart(origin.state(), position),
            blocks=run.blocks_before(position),
        )
        run.model.extend(restored, run.tokens[position : position + 100], logits="none")
        for overlap in (False, True):
            edge = 3 * run.profile.block_tokens
            expected = run.kept.rows[edge, overlap] if has_rows else None
            assert restored.rows_payload(2, overlap=overlap) == expected
            later = run.kept.rows[edge + run.profile.block_tokens, overlap]
            assert restored.rows_payload(3, overlap=overlap) == later
        assert restored.rows_payload(0, overlap=False) is None


def test_rows_of_blocks_that_the_sequence_has_left_behind_are_gone() -> None:
    run = Run(SCHEDULES["window, csa"], seed=6)
    sequence = run.model.start()
    run.model.extend(sequence, run.tokens, logits="none")
    assert sequence.rows_payload(0, overlap=False) is None
    assert sequence.rows_payload(0, overlap=True) is None
    newest = len(run.blocks) - 1
    assert sequence.rows_payload(newest, overlap=True) == run.kept.rows[run.edges[newest], True]
    for index in (-1, newest + 1):
        with pytest.raises(InvalidArgument, match="index"):
            sequence.rows_payload(index, overlap=False)


def test_a_fork_has_the_rows_of_its_trunk() -> None:
    run = Run(SCHEDULES["window, csa"], seed=6)
    trunk = run.model.start()
    run.model.extend(trunk, run.tokens[:100], logits="none")
    branch = trunk.fork()
    assert branch.rows_payload(2, overlap=True) == run.kept.rows[96, True]
    run.model.extend(branch, run.tokens[100:140], logits="none")
    assert branch.rows_payload(3, overlap=True) == run.kept.rows[128, True]


def test_edges_are_told_in_order_and_a_hook_that_raises_leaves_the_sequence_whole(
    tiny: Model, tokens_of
) -> None:
    tokens, seen = tokens_of(tiny, 300, 4), []
    sequence = tiny.start()
    for first, last in ((0, 40), (40, 41), (41, 256), (256, 300)):
        tiny.extend(sequence, tokens[first:last], logits="none", on_edge=seen.append)
    assert seen == list(range(32, 300, 32))

    def refuse(edge: int) -> None:
        raise OSError(f"no room at {edge}")

    stopped = tiny.start()
    with pytest.raises(OSError, match="no room at 32"):
        tiny.extend(stopped, tokens, logits="none", on_edge=refuse)
    tiny.extend(stopped, tokens[stopped.position :], logits="none")
    assert stopped.position == 300
    assert stopped.state() == sequence.state()


def test_rows_that_do_not_fit_are_refused_by_name() -> None:
    run = Run(Schedule((csa(), hca()), formats=FLASH, window=40, length=160), seed=8)
    good, edge = run.rows_start(128, overlap=True), 128
    short = RowsStart(good.payloads[1:], edge, overlap=True)
    cut = RowsStart([good.payloads[0], good.payloads[1][:-1]], edge, overlap=True)
    plain = RowsStart(run.rows_start(edge, overlap=False).payloads, edge, overlap=True)
    for start, message in (
        (short, r"rows=1; allowed: 2 for edge 128"),
        (cut, r"rows\[1\]=.*bytes"),
        (
            plain,
            rf"rows\[1\]={run.profile.rows_block_bytes}; allowed: {run.profile.rows_overlap_block_bytes} ",
        ),
        (replace(good, edge=100), "edge=100"),
        (replace(good, edge=160), "edge=160"),
        (replace(good, edge=0), "edge=0"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            run.model.restore(position=edge, start=start, blocks=run.blocks_before(edge))
    with pytest.raises(InvalidArgument, match="tokens=0; allowed: 128 - replay_from 124"):
        run.model.restore(position=edge, start=replace(good, overlap=False), blocks=run.blocks_before(edge))
    with pytest.raises(InvalidArgument, match="position=130"):
        run.model.restore(position=130, start=good, tokens=run.tokens[128:130], blocks=run.blocks_before(130))


def _restored(run: Run, start: RowsStart, edge: int) -> Sequence:
    return run.model.restore(
        position=edge,
        start=start,
        tokens=run.tokens[start.state_at(run.profile) : edge],
        blocks=run.blocks_before(edge),
    )
