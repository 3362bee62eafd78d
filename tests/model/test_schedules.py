"""Every schedule, every way: a prompt cut anywhere, decoded, or restored from any source gives the bits of one prefill."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator

import pytest
import torch

from kvstore.profile.layout import rows_needed
from kvstore_workers.model import RowsStart, Sequence, StateStart
from tests.support.long import examples, long, one_in
from tests.support.schedules import OFTEN, SCHEDULES, Kept, Run, blocks_of, same_bytes, sliced

EVERY_POSITION = ("hca first, csa last", "flash formats, hca first")
DECODED_FIRST = 40
BEFORE_THE_LAST_EDGE = 12


@pytest.fixture(scope="module", params=[name if name in OFTEN else long(name) for name in SCHEDULES])
def run(request: pytest.FixtureRequest) -> Run:
    name = request.param
    return Run(SCHEDULES[name], name=name, seed=zlib.crc32(name.encode()))


def _check_kept(run: Run, kept: Kept, sequence: Sequence) -> None:
    assert kept.states == run.kept.states
    assert kept.rows == run.kept.rows
    assert None not in kept.rows.values()
    assert blocks_of(sequence) == run.blocks


def test_random_cuts_give_the_logits_blocks_states_and_rows_of_the_whole(run: Run) -> None:
    rng = random.Random(1)
    for _ in range(examples(1)):
        sequence, kept, parts = run.model.start(), Kept(), []
        while sequence.position < len(run.tokens):
            count = rng.choice([1, 2, 5, 17, 60, 128, 150])
            cut = run.tokens[sequence.position : sequence.position + count]
            parts.append(kept.advance(run.model, sequence, cut))
        assert same_bytes(torch.cat(parts), run.logits)
        _check_kept(run, kept, sequence)


def test_decoding_gives_the_logits_blocks_states_and_rows_of_a_prefill(run: Run) -> None:
    # From the first token on, and at the end, over an edge, where every selection has more than it takes; two go all the way.
    length = len(run.tokens)
    whole = run.name in EVERY_POSITION
    middle = range(0) if whole else range(DECODED_FIRST, run.edges[-1] - BEFORE_THE_LAST_EDGE)
    sequence, kept, logits = run.model.start(), Kept(), []
    while (at := sequence.position) < length:
        end = middle.stop if at in middle else at + 1
        logits.append(kept.advance(run.model, sequence, run.tokens[at:end]))
    assert same_bytes(torch.cat(logits), run.logits)
    _check_kept(run, kept, sequence)


def _sources(run: Run, edge: int, rng: random.Random) -> Iterator[tuple[str, StateStart | RowsStart | None]]:
    """Everything that a state at `edge` can be made from."""
    yield "state", StateStart(run.kept.states[edge], edge)
    yield "nothing", None
    earlier = rng.choice([known for known in run.edges if known <= edge])
    yield f"replay from the state at {earlier}", StateStart(run.kept.states[earlier], earlier)
    for overlap in (False, True):
        yield f"rows, overlap {overlap}", run.rows_start(edge, overlap=overlap)
        yield (
            f"replay from the rows at {earlier}, overlap {overlap}",
            run.rows_start(earlier, overlap=overlap),
        )


def test_every_source_at_every_edge_goes_on_as_the_prefill_did(run: Run) -> None:
    rng = random.Random(2)
    schedule = list(SCHEDULES).index(run.name)
    for number, edge in enumerate(run.edges):
        blocks = run.blocks_before(edge)
        for order, (name, start) in enumerate(_sources(run, edge, rng)):
            # A quarter of them, and the others on other schedules, where there are many edges.
            if len(run.edges) > 4 and (number + order // 2 + schedule) % one_in(4):
                continue
            if start is None:
                replay_from = max(0, edge - run.profile.exact_replay_tokens)
            else:
                replay_from = start.state_at(run.profile)
            lazy = (number + order) % 2 == 1
            restored = run.model.restore(
                position=edge,
                start=start,
                tokens=run.tokens[replay_from:edge],
                blocks=() if lazy else blocks,
                feed=sliced(run.profile, blocks, rng.randrange(1, 5)) if lazy else None,
            )
            try:
                run.check(restored, edge)
            except AssertionError as error:
                raise AssertionError(f"{name} at {edge}, lazy {lazy}") from error


@pytest.mark.parametrize("name", SCHEDULES)
def test_rows_without_the_overlap_start_as_many_tokens_earlier_as_the_profile_says(name: str) -> None:
    profile = SCHEDULES[name].profile()
    edge = 4 * profile.block_tokens
    ratios = [layer.ratio for layer in profile.layers if layer.kind.has_keys]
    assert rows_needed(profile, edge, overlap=False).state_at == edge - max(ratios, default=0)
    assert rows_needed(profile, edge, overlap=True).state_at == edge


def _resume_and_check(run: Run, positions: list[int], *, after: int) -> None:
    """States of a run that decodes, resumed at once and by slices."""
    origin, at = run.model.start(), 0
    for number, position in enumerate(positions):
        run.model.extend(origin, run.tokens[at:position], logits="none")
        at, state, blocks = position, origin.state(), run.blocks_before(position)
        feed = sliced(run.profile, blocks, 1 + number % 4) if number % 2 else None
        restored = run.model.restore(
            position=position,
            start=StateStart(state, position),
            blocks=() if feed else blocks,
            feed=feed,
        )
        assert restored.state() == state
        run.check(restored, position, after=after)


def test_a_state_at_random_positions_goes_on_as_the_prefill_did(run: Run) -> None:
    positions = sorted(random.Random(3).sample(range(1, len(run.tokens) - 20), examples(4)))
    _resume_and_check(run, positions, after=60)


@pytest.mark.parametrize("name", EVERY_POSITION)
def test_a_state_at_every_position_goes_on_as_the_prefill_did(name: str) -> None:
    run = Run(SCHEDULES[name], name=name, seed=7)
    _resume_and_check(run, list(range(1, 2 * run.profile.block_tokens + 20, one_in(3))), after=48)
