"""State out and in: a sequence restored anywhere goes on as if it had never stopped, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from kvstore.errors import InvalidArgument
from kvstore.profile.layout import state_layout
from kvstore_workers.model import Model, Sequence, StateStart
from tests.support.long import one_in

AFTER = (
    48  # three windows of tiny: an error in the overlap shows only once an entry made from it is attended to
)


def _keeper(sequence: Sequence, states: dict[int, bytes]) -> Callable[[int], None]:
    def keep(edge: int) -> None:
        states[edge] = sequence.state_at(edge)

    return keep


def _resumed(model: Model, *, blocks: list[bytes], state: bytes, position: int) -> Sequence:
    return model.restore(position=position, start=StateStart(state, position), blocks=blocks)


@pytest.mark.parametrize("name", ["tiny", "quantised"])
def test_resume_at_every_position_of_three_blocks_continues_bit_for_bit(
    name: str, request: pytest.FixtureRequest, tokens_of, blocks_of
) -> None:
    model: Model = request.getfixturevalue(name)
    last = 96
    tokens = tokens_of(model, last + AFTER, 3)
    expected = model.extend(model.start(), tokens, logits="all")
    assert expected is not None
    origin = model.start()
    for position in range(1, last + 1):
        model.extend(origin, [tokens[position - 1]], logits="none")
        # What is tried for a position depends on what is left of it by 3, and by 5.
        if position // 5 % one_in(3) and position < last - 5:
            continue
        state = origin.state()
        assert len(state) == state_layout(model.profile, position).total_bytes
        restored = _resumed(model, blocks=blocks_of(origin), state=state, position=position)
        assert restored.position == position
        assert restored.state() == state, f"position {position}"
        assert blocks_of(restored) == blocks_of(origin), f"position {position}"
        # for a window one token at a time from every residue of the groups and windows, in one call from the rest
        single = model.profile.window_tokens + 1 if position % 5 == 0 else 0
        steps = [*range(position, position + single), position + single, position + AFTER]
        for step, end in pairwise(steps):
            logits = model.extend(restored, tokens[step:end], logits="all")
            assert logits is not None
            assert torch.equal(logits, expected[step:end]), f"resumed at {position}, token {step}"
        # a third of the positions has every residue too
        if position % 3 == 0:
            at_once = model.start()
            model.extend(at_once, tokens[:position], logits="none")
            assert at_once.state() == state, f"position {position}"
            model.extend(at_once, tokens[position : position + AFTER], logits="none")
            assert restored.state() == at_once.state(), f"resumed at {position}"
            assert blocks_of(restored) == blocks_of(at_once), f"resumed at {position}"


@pytest.mark.parametrize("position", [64, 78])
def test_a_resume_without_the_overlap_goes_wrong(tiny: Model, tokens_of, blocks_of, position: int) -> None:
    tokens = tokens_of(tiny, position + AFTER, 3)
    origin = tiny.start()
    tiny.extend(origin, tokens[:position], logits="none")
    state = bytearray(origin.state())
    for section in state_layout(tiny.profile, position).sections:
        if section.part == "overlap":
            state[section.offset : section.end] = bytes(section.length)
    restored = _resumed(tiny, blocks=blocks_of(origin), state=bytes(state), position=position)
    right = tiny.extend(origin, tokens[position:], logits="all")
    wrong = tiny.extend(restored, tokens[position:], logits="all")
    assert right is not None
    assert wrong is not None
    steps = [step for step in range(AFTER) if not torch.equal(right[step], wrong[step])]
    assert steps, "the comparison cannot see a missing overlap"
    # the damage starts with the entry that the overlap goes into, not at once
    assert steps[0] >= 3 - position % 4


def test_states_at_edges_are_those_of_runs_that_end_there(tiny: Model, tokens_of) -> None:
    tokens = tokens_of(tiny, 300, 4)
    found: dict[int, bytes] = {}
    sequence = tiny.start()
    for first, last in ((0, 40), (40, 41), (41, 256), (256, 300)):
        tiny.extend(sequence, tokens[first:last], logits="none", on_edge=_keeper(sequence, found))
    assert list(found) == list(range(32, 300, 32))
    for edge, state in found.items():
        alone = tiny.start()
        tiny.extend(alone, tokens[:edge], logits="none")
        assert alone.state() == state, f"edge {edge}"
        assert len(state) == tiny.profile.state_bytes


def test_last_edge_state_is_there_for_the_newest_edge_only_if_it_was_computed_here(
    tiny: Model, tokens_of, blocks_of
) -> None:
    tokens = tokens_of(tiny, 200, 5)
    sequence = tiny.start()
    tiny.extend(sequence, tokens[:20], logits="none")
    assert sequence.last_edge_state() is None
    edges: dict[int, bytes] = {}
    for position in range(20, 200):
        tiny.extend(sequence, [tokens[position]], logits="none", on_edge=_keeper(sequence, edges))
        edge = (position + 1) // 32 * 32
        if edge:
            assert sequence.last_edge_state() == (edge, edges[edge]), f"position {position + 1}"
    restored = _resumed(tiny, blocks=blocks_of(sequence), state=sequence.state(), position=200)
    assert restored.last_edge_state() is None
    tiny.extend(restored, [1] * 24, logits="none")
    tiny.extend(sequence, [1] * 24, logits="none")
    assert restored.last_edge_state() == sequence.last_edge_state()
    assert restored.last_edge_state() is not None


@pytest.mark.parametrize("block_tokens", [16, 48, 160, 256])
def test_blocks_that_are_no_tile_keep_their_edges(
    tiny: Model, tokens_of, blocks_of, block_tokens: int
) -> None:
    profile = replace(tiny.profile, name="other blocks", block_tokens=block_tokens)
    model = Model.random(replace(tiny.config, profile=profile), seed=1)
    tokens = tokens_of(model, 600, 9)
    sequence, edges = model.start(), dict[int, bytes]()
    for first in range(0, 600, 71):
        model.extend(sequence, tokens[first : first + 71], logits="none", on_edge=_keeper(sequence, edges))
        edge = sequence.position // block_tokens * block_tokens
        assert sequence.last_edge_state() == ((edge, edges[edge]) if edge else None)
    assert sorted(edges) == list(range(block_tokens, 601, block_tokens))
    newest = max(edges)
    blocks = blocks_of(sequence)
    replay_from = max(0, newest - profile.exact_replay_tokens)
    replayed = model.restore(position=newest, start=None, tokens=tokens[replay_from:newest], blocks=blocks)
    assert replayed.state() == edges[newest]
    model.extend(replayed, tokens[newest:], logits="none")
    assert replayed.state() == sequence.state()
    restored = _resumed(model, blocks=blocks, state=sequence.state(), position=sequence.position)
    assert restored.state() == sequence.state()


def test_a_fork_goes_its_own_way(tiny: Model, tokens_of, blocks_of) -> None:
    tokens = tokens_of(tiny, 150, 6)
    trunk = tiny.start()
    tiny.extend(trunk, tokens[:77], logits="none")
    before, blocks = trunk.state(), blocks_of(trunk)
    branch = trunk.fork()
    other = tiny.extend(branch, tokens[100:150], logits="all")
    assert trunk.state() == before
    assert blocks_of(trunk) == blocks
    assert trunk.position == 77
    straight = tiny.start()
    tiny.extend(straight, tokens[:77], logits="none")
    expected = tiny.extend(straight, tokens[100:150], logits="all")
    assert other is not None
    assert expected is not None
    assert torch.equal(other, expected)


def test_a_long_run_keeps_its_old_blocks_and_its_newest_state(tiny: Model, tokens_of, blocks_of) -> None:
    tokens = tokens_of(tiny, 1500, 7)
    whole, stepped = tiny.start(), tiny.start()
    tiny.extend(whole, tokens, logits="none")
    for first in range(0, 1500, 97):
        tiny.extend(stepped, tokens[first : first + 97], logits="none")
    assert whole.state() == stepped.state()
    assert blocks_of(whole) == blocks_of(stepped)
    assert all(len(block) == tiny.profile.block_bytes for block in blocks_of(whole))


def test_payloads_that_do_not_fit_are_refused_by_name(tiny: Model, tokens_of, blocks_of) -> None:
    sequence = tiny.start()
    tiny.extend(sequence, tokens_of(tiny, 70, 8), logits="none")
    blocks, state = blocks_of(sequence), sequence.state()
    with pytest.raises(InvalidArgument, match="blocks"):
        _resumed(tiny, blocks=blocks[:1], state=state, position=70)
    with pytest.raises(InvalidArgument, match=r"blocks\[1\]"):
        _resumed(tiny, blocks=[blocks[0], blocks[1][:-1]], state=state, position=70)
    with pytest.raises(InvalidArgument, match="state"):
        _resumed(tiny, blocks=blocks, state=state, position=71)
    with pytest.raises(InvalidArgument, match="position"):
        _resumed(tiny, blocks=[], state=state, position=-1)
    with pytest.raises(InvalidArgument, match="index"):
        sequence.block_payload(2)
    with pytest.raises(InvalidArgument, match="index"):
        sequence.block_payload(-1)
