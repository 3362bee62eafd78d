"""Entries that come layer by layer: taken when a layer is about to read them, and never missed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore.errors import DamagedBytes, InvalidArgument
from kvstore.profile.layout import LayerSlice, layer_slices
from kvstore_workers.model import EntryFeed, Sequence, StateStart, attention
from tests.support.schedules import SCHEDULES, Run, Schedule, W, blocks_of, csa, hca, same_bytes, sliced

LAYERS = Schedule((W, csa(), hca(), csa(), W))
EDGE = 224


@pytest.fixture(scope="module")
def run() -> Run:
    return Run(LAYERS, seed=3)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the forward does, in order: `layer l` before it attends; a `_noted` feed adds its slices."""
    seen: list[str] = []
    plain = attention._entries

    def noted(*args: object, layer: int, **rest: object) -> object:
        seen.append(f"layer {layer}")
        return plain(*args, layer=layer, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(attention, "_entries", noted)
    return seen


def _noted(run: Run, position: int, count: int, events: list[str]) -> EntryFeed:
    for part, payloads in sliced(run.profile, run.blocks_before(position), count):
        events.append(f"slice {part.first_layer} to {part.end_layer - 1}")
        yield part, payloads


def _lazy(run: Run, feed: EntryFeed, *, replay: int = 0) -> Sequence:
    """At EDGE from its state, or by a replay of `replay` tokens from nothing."""
    start = None if replay else StateStart(run.kept.states[EDGE], EDGE)
    return run.model.restore(position=EDGE, start=start, tokens=run.tokens[EDGE - replay : EDGE], feed=feed)


def test_each_slice_is_taken_right_before_the_first_layer_that_reads_it(run: Run, events: list[str]) -> None:
    sequence = _lazy(run, _noted(run, EDGE, 16, events))
    assert events == []
    run.model.extend(sequence, run.tokens[EDGE : EDGE + 1])
    assert events == [
        "slice 0 to 1", "layer 0", "layer 1", "slice 2 to 2", "layer 2", "slice 3 to 4", "layer 3", "layer 4",
    ]  # fmt: skip


def test_a_replay_takes_only_the_slices_that_it_reads(run: Run, events: list[str]) -> None:
    sequence = _lazy(run, _noted(run, EDGE, 16, events), replay=run.profile.exact_replay_tokens)
    assert "slice 3 to 4" in events, "layer 3 runs for the last layer's rows"
    assert events.index("slice 2 to 2") > events.index("layer 1")
    assert "layer 4" not in events
    run.check(sequence, EDGE)


def test_what_reads_a_restored_block_takes_the_rest_of_the_feed_first(run: Run) -> None:
    for act in (Sequence.finish_feed, Sequence.fork, lambda sequence: sequence.block_payload(0)):
        sequence = _lazy(run, sliced(run.profile, run.blocks_before(EDGE), 4))
        act(sequence)
        assert blocks_of(sequence) == run.blocks_before(EDGE)
        run.check(sequence.fork(), EDGE)
        run.check(sequence, EDGE)


def test_states_rows_and_new_blocks_need_none_of_the_feed(run: Run, events: list[str]) -> None:
    # Without logits the last layer attends to nothing, so here its slice is never taken.
    run = Run(SCHEDULES["csa, hca"], seed=3)
    sequence = _lazy(run, _noted(run, EDGE, 2, events))
    assert sequence.state() == run.kept.states[EDGE]
    run.model.extend(sequence, run.tokens[EDGE:288], logits="none")
    assert [event for event in events if event.startswith("slice")] == ["slice 0 to 0"]
    assert sequence.block_payload(8) == run.blocks[8]
    assert sequence.rows_payload(8, overlap=True) == run.kept.rows[288, True]
    assert sequence.state_at(288) == run.kept.states[288]
    assert sequence.block_payload(0) == run.blocks[0]


def test_a_state_inside_a_block_keeps_its_open_entries_behind_those_that_come(run: Run) -> None:
    for position in range(EDGE + 1, EDGE + 32, 6):
        origin = run.model.start()
        run.model.extend(origin, run.tokens[:position], logits="none")
        restored = run.model.restore(
            position=position,
            start=StateStart(origin.state(), position),
            feed=sliced(run.profile, run.blocks_before(position), 4),
        )
        assert restored.state() == origin.state()
        run.check(restored, position)


def test_window_only_models_and_empty_prefixes_take_feeds_too() -> None:
    run = Run(SCHEDULES["window, window"], seed=3)
    sequence = _lazy(run, sliced(run.profile, run.blocks_before(EDGE), 4))
    run.check(sequence, EDGE)
    other = Run(LAYERS, seed=3)
    at_start = other.model.restore(position=0, start=None, feed=sliced(other.profile, [], 2))
    logits = other.model.extend(at_start, other.tokens, logits="all")
    assert logits is not None
    assert same_bytes(logits, other.logits)


def test_what_the_feed_raises_comes_out_of_the_call_that_needed_it(run: Run) -> None:
    def failing() -> Iterator[tuple[LayerSlice, list[bytes]]]:
        yield next(sliced(run.profile, run.blocks_before(EDGE), 16))
        raise DamagedBytes("lost on the way")

    sequence = _lazy(run, failing())
    with pytest.raises(DamagedBytes, match="lost on the way"):
        run.model.extend(sequence, run.tokens[EDGE : EDGE + 1])
    with pytest.raises(InvalidArgument, match="layer=2"):
        run.model.extend(sequence, run.tokens[EDGE : EDGE + 1])
    with pytest.raises(DamagedBytes, match="lost on the way"):
        _lazy(run, failing(), replay=run.profile.exact_replay_tokens)


def test_slices_that_do_not_fit_are_refused_by_name(run: Run) -> None:
    parts = list(sliced(run.profile, run.blocks_before(EDGE), 16))
    (first, payloads), second = parts[0], parts[1]
    for feed, message in (
        ([second], r"slice=layers 2 to 2; allowed: from layer 0 on, of 5"),
        ([parts[0], parts[0]], r"slice=layers 0 to 1; allowed: from layer 2 on"),
        ([(first, payloads[:-1])], "blocks=6; allowed: 7"),
        ([(first, [*payloads[:-1], payloads[-1][1:]])], r"blocks\[6\]"),
        ([parts[0]], "layer=2"),
        ([(LayerSlice(0, 6, 0, run.profile.block_bytes), payloads)], "layers 0 to 5"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            _lazy(run, iter(feed)).finish_feed()
    with pytest.raises(InvalidArgument, match="at once or by a feed"):
        run.model.restore(
            position=EDGE,
            start=StateStart(run.kept.states[EDGE], EDGE),
            blocks=run.blocks_before(EDGE),
            feed=iter(parts),
        )


def test_a_block_cut_in_any_number_of_slices_is_whole_again(run: Run) -> None:
    for count in range(1, 17):
        feed = sliced(run.profile, run.blocks_before(EDGE), count)
        sequence = _lazy(run, feed)
        sequence.finish_feed()
        assert blocks_of(sequence) == run.blocks_before(EDGE)
    assert len(layer_slices(run.profile, 16)) == 3
