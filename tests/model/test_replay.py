"""Replay: window rows and overlap from tokens and stored entries, without touching an entry."""

from __future__ import annotations

import pytest
import torch

from kvstore.errors import InvalidArgument
from kvstore.profile.layout import state_layout
from kvstore_workers.model import Model, Sequence, StateStart

LENGTH = 288
AFTER = 48


class Run:
    """One run of `LENGTH` tokens and everything that a store would have kept of it."""

    def __init__(self, model: Model, tokens: list[int]) -> None:
        self.model = model
        self.tokens = tokens
        self.states: dict[int, bytes] = {}
        self.sequence = model.start()
        logits = model.extend(self.sequence, tokens, logits="all", on_edge=self._keep)
        assert logits is not None
        self.logits = logits
        edges = LENGTH // model.profile.block_tokens
        self.blocks = [self.sequence.block_payload(i) for i in range(edges)]

    def _keep(self, edge: int) -> None:
        self.states[edge] = self.sequence.state_at(edge)

    def replay(self, position: int, replay_from: int, state: bytes | None, *, exact: bool = True) -> Sequence:
        return self.model.restore(
            position=position,
            start=None if state is None else StateStart(state, replay_from),
            tokens=self.tokens[replay_from:position],
            blocks=self.blocks[: position // self.model.profile.block_tokens],
            exact=exact,
        )

    def check(self, replayed: Sequence, position: int) -> None:
        assert replayed.position == position
        assert replayed.state() == self.states[position]
        whole = position // self.model.profile.block_tokens
        assert [replayed.block_payload(i) for i in range(whole)] == self.blocks[:whole]
        after = self.tokens[position : position + AFTER]
        # The first ones by themselves, so that every residue of a CSA group is left once.
        parts = [*([token] for token in after[:4]), after[4:]]
        logits = torch.cat([self.model.extend(replayed, part, logits="all") for part in parts])  # type: ignore[misc]
        assert torch.equal(logits, self.logits[position : position + AFTER])


@pytest.fixture(scope="module", params=["tiny", "quantised"])
def run(request: pytest.FixtureRequest, tokens_of) -> Run:
    model = request.getfixturevalue(request.param)
    return Run(model, tokens_of(model, LENGTH, 11))


def _latest(run: Run, position: int) -> int:
    return max(0, position - run.model.profile.exact_replay_tokens)


@pytest.mark.parametrize("position", range(32, 256, 32))
def test_a_triangle_from_nothing_gives_the_original_bytes(run: Run, position: int) -> None:
    run.check(run.replay(position, _latest(run, position), None), position)


@pytest.mark.parametrize("position", [32, 128, 224])
def test_a_rectangle_gives_the_same_bytes_as_the_triangle(run: Run, position: int) -> None:
    for edge in (None, 32):
        replay_from = _latest(run, position) if edge is None else edge
        rectangle = run.model.restore(
            position=position,
            start=None if edge is None else StateStart(run.states[edge], edge),
            tokens=run.tokens[replay_from:position],
            blocks=run.blocks[: position // run.model.profile.block_tokens],
            triangular=False,
        )
        run.check(rectangle, position)


@pytest.mark.parametrize("earlier", [1, 7, 32, 100])
def test_more_tokens_than_needed_give_the_same_bytes(run: Run, earlier: int) -> None:
    run.check(run.replay(224, max(0, _latest(run, 224) - earlier), None), 224)


@pytest.mark.parametrize("position", [64, 128, 160, 224])
def test_a_replay_from_every_earlier_checkpoint_gives_the_original_bytes(run: Run, position: int) -> None:
    for edge in range(32, position + 1, 32):
        run.check(run.replay(position, edge, run.states[edge]), position)


def test_one_token_fewer_is_refused_and_if_forced_gives_other_bytes(run: Run) -> None:
    differing = []
    for position in (128, 160, 192, 224):
        late = _latest(run, position) + 1
        with pytest.raises(InvalidArgument, match="replay_from"):
            run.replay(position, late, None)
        state, original = run.replay(position, late, None, exact=False).state(), run.states[position]
        for section in state_layout(run.model.profile, position).sections:
            if state[section.offset : section.end] != original[section.offset : section.end]:
                differing.append((section.part, section.layer))
                first = slice(section.offset, section.offset + section.row_bytes)
                assert state[first] != original[first]
                rest = slice(section.offset + section.row_bytes, section.end)
                assert state[rest] == original[rest], "only the oldest row depends on the missing token"
    last_layer = ("window", run.model.profile.layer_count - 1)
    assert set(differing) <= {last_layer}
    if run.model.profile.name == "tiny":  # quantised rows may round the difference away
        assert differing


def test_a_bounded_replay_is_near_but_not_equal(run: Run) -> None:
    position = 224
    state = run.replay(position, position - 2 * run.model.profile.window_tokens, None, exact=False).state()
    assert len(state) == len(run.states[position])
    assert state != run.states[position]
    layout = state_layout(run.model.profile, position)
    first_layer = layout.find("window", 0)
    assert state[: first_layer.end] == run.states[position][: first_layer.end]


def test_a_replay_uses_the_entries_it_is_given(run: Run) -> None:
    position = 224
    damaged = [bytes(len(block)) for block in run.blocks[:7]]
    replayed = run.model.restore(
        position=position, start=None, tokens=run.tokens[_latest(run, position) : position], blocks=damaged
    )
    assert replayed.state() != run.states[position]
    assert [replayed.block_payload(i) for i in range(7)] == damaged


def test_rows_outside_the_triangle_are_never_read(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    model, position = run.model, 224
    plain = model._sequence

    def noisy(rows_from: int, at: int) -> Sequence:
        sequence = plain(rows_from, at)
        with torch.inference_mode():
            for rows in sequence.window:
                rows.values.rows.fill_(1e4)
            for stream in sequence.streams.values():
                stream.rows.fill_(1e4)
        return sequence

    monkeypatch.setattr(model, "_sequence", noisy)
    assert run.replay(position, _latest(run, position), None).state() == run.states[position]


def test_arguments_that_do_not_fit_are_refused_by_name(run: Run) -> None:
    model, tokens, state = run.model, run.tokens, StateStart(run.states[32], 32)
    with pytest.raises(InvalidArgument, match="position=100"):
        model.restore(position=100, start=None, tokens=tokens[:100], blocks=run.blocks[:3])
    with pytest.raises(InvalidArgument, match="tokens=63; allowed: 96 - replay_from 32"):
        model.restore(position=96, start=state, tokens=tokens[33:96], blocks=run.blocks[:3])
    with pytest.raises(InvalidArgument, match="tokens=65; allowed: 64 - replay_from 0"):
        model.restore(position=64, start=None, tokens=tokens[:65], blocks=run.blocks[:2])
    with pytest.raises(InvalidArgument, match="blocks=2; allowed: 3"):
        model.restore(position=96, start=None, tokens=tokens[:96], blocks=run.blocks[:2])
    inside, short = StateStart(run.states[32], 33), StateStart(b"short", 32)
    with pytest.raises(InvalidArgument, match="replay_from=33"):
        model.restore(position=96, start=inside, tokens=tokens[33:96], blocks=run.blocks[:3])
    with pytest.raises(InvalidArgument, match="state=5"):
        model.restore(position=96, start=short, tokens=tokens[32:96], blocks=run.blocks[:3])
    with pytest.raises(InvalidArgument, match="replay_from=96; allowed: 0 to"):
        model.restore(position=96, start=None, blocks=run.blocks[:3])
    with pytest.raises(InvalidArgument, match="tokens=-1"):
        model.restore(position=64, start=None, tokens=[*tokens[:63], -1], blocks=run.blocks[:2])
    assert model.restore(position=0, start=None).state() == model.start().state()
