"""The forward itself: the same bits however a prompt is cut, and calls that make no sense refused."""

from __future__ import annotations

import random

import pytest
import torch

from kvstore.errors import InvalidArgument
from kvstore.profile.registry import get_profile
from kvstore_workers.model import Model, ModelConfig, StateStart, self_check
from kvstore_workers.model.select import scores, top


@pytest.mark.parametrize("name", ["tiny", "quantised"])
@pytest.mark.parametrize("seed", range(4))
def test_a_prompt_cut_at_random_gives_the_logits_of_the_whole_bit_for_bit(
    name: str, seed: int, request: pytest.FixtureRequest, tokens_of
) -> None:
    model: Model = request.getfixturevalue(name)
    tokens = tokens_of(model, 420, seed)
    whole = model.extend(model.start(), tokens, logits="all")
    assert whole is not None
    rng = random.Random(seed)
    sequence, parts = model.start(), []
    while sequence.position < len(tokens):
        count = rng.choice([1, 2, 3, 8, 40, 128, 200])
        part = model.extend(sequence, tokens[sequence.position : sequence.position + count], logits="all")
        assert part is not None
        parts.append(part)
    assert torch.equal(torch.cat(parts), whole), f"seed {seed}"


def test_last_and_none_are_parts_of_all(tiny: Model, tokens_of) -> None:
    tokens = tokens_of(tiny, 300, 1)
    for count in (1, 127, 128, 129, 300):
        a, b, c = tiny.start(), tiny.start(), tiny.start()
        every = tiny.extend(a, tokens[:count], logits="all")
        last = tiny.extend(b, tokens[:count])
        assert tiny.extend(c, tokens[:count], logits="none") is None
        assert every is not None
        assert last is not None
        assert every.shape == (count, tiny.config.vocab_size)
        assert torch.equal(last, every[-1:])
        assert a.state() == b.state() == c.state()
        assert a.position == b.position == c.position == count


def test_no_tokens_change_nothing(tiny: Model) -> None:
    sequence = tiny.start()
    assert tiny.extend(sequence, [], logits="none") is None
    empty = tiny.extend(sequence, [], logits="all")
    assert empty is not None
    assert empty.shape == (0, tiny.config.vocab_size)
    with pytest.raises(InvalidArgument, match="tokens"):
        tiny.extend(sequence, [])
    assert sequence.position == 0


@pytest.mark.parametrize("bad", [-1, 320])
def test_a_token_outside_the_vocabulary_is_refused_before_anything_changes(tiny: Model, bad: int) -> None:
    sequence = tiny.start()
    before = sequence.state()
    with pytest.raises(InvalidArgument, match="tokens"):
        tiny.extend(sequence, [1, bad, 2])
    assert sequence.position == 0
    assert sequence.state() == before


def test_unknown_logits_and_dtypes_are_refused(tiny: Model) -> None:
    with pytest.raises(InvalidArgument, match="logits"):
        tiny.extend(tiny.start(), [1], logits="some")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="dtype"):
        Model.random(tiny.config, seed=1, dtype=torch.float16)


def test_the_index_takes_the_best_visible_entries_and_the_lowest_among_equals() -> None:
    score = torch.tensor(
        [
            [1.0, 3.0, 3.0, 0.0, 3.0, 9.0],
            [0.0, -0.0, 0.0, -1.0, 5.0, 5.0],
            [-2.0, -1.0, -3.0, -1.0, -1.0, 7.0],
            [1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
        ]
    )
    visible = torch.tensor([5, 4, 5, 1])
    assert top(score, visible, 3).tolist() == [[1, 2, 4], [0, 1, 2], [1, 3, 4], [0, 6, 6]]


@pytest.mark.parametrize("seed", range(3))
def test_the_index_choice_is_that_of_a_stable_sort_whatever_is_stored_behind(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    score = torch.relu(torch.randn(20, 300, generator=generator)).mul(4).round()
    visible = torch.randint(1, 200, (20,), generator=generator)
    wide, narrow = top(score, visible, 32), top(score[:, :220].contiguous(), visible, 32)
    for row in range(20):
        ordered = (
            score[row, : visible[row]].sort(descending=True, stable=True).indices[:32].sort().values.tolist()
        )
        assert [index for index in wide[row].tolist() if index < 300] == ordered, f"seed {seed} row {row}"
        assert [index for index in narrow[row].tolist() if index < 220] == ordered, f"seed {seed} row {row}"


def test_index_scores_are_the_weighted_sum_of_relus_in_chunks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    queries, keys = torch.randn(6, 3, 8, generator=generator), torch.randn(50, 8, generator=generator)
    weights = torch.randn(6, 3, generator=generator)
    expected = (torch.einsum("rhd,nd->rhn", queries, keys).relu() * weights[:, :, None]).sum(1)
    monkeypatch.setattr("kvstore_workers.model.select.KEY_CHUNK", 16)
    assert torch.allclose(scores(queries, keys, weights), expected, atol=1e-5)


def test_flash_slim_runs_replays_and_resumes_with_the_stored_formats_of_flash(tokens_of, blocks_of) -> None:
    model = Model.random(ModelConfig.for_profile(get_profile("flash-slim")), seed=3)
    tokens = tokens_of(model, 300, 3)
    states: dict[int, bytes] = {}
    sequence = model.start()

    def keep(edge: int) -> None:
        states[edge] = sequence.state_at(edge)

    whole = model.extend(sequence, tokens, logits="all", on_edge=keep)
    assert whole is not None
    assert [len(state) for state in states.values()] == [model.profile.state_bytes] * 2
    assert {len(block) for block in blocks_of(sequence)} == {model.profile.block_bytes}
    for restored in (
        model.restore(position=256, start=None, tokens=tokens[:256], blocks=blocks_of(sequence)),
        model.restore(position=256, start=StateStart(states[256], 256), blocks=blocks_of(sequence)),
    ):
        assert restored.state() == states[256]
        rest = model.extend(restored, tokens[256:], logits="all")
        assert rest is not None
        assert torch.equal(rest, whole[256:])


@pytest.mark.gpu
def test_a_cuda_model_agrees_with_the_cpu_and_with_itself(tiny: Model, tokens_of, require) -> None:
    require("cuda", torch.cuda.is_available(), "needs a CUDA device")
    model = Model.random(tiny.config, seed=1, device="cuda")
    tokens = tokens_of(tiny, 300, 1)
    ours, theirs = (
        model.extend(model.start(), tokens, logits="all"),
        tiny.extend(tiny.start(), tokens, logits="all"),
    )
    assert ours is not None
    assert theirs is not None
    assert float((ours.cpu() - theirs).abs().max()) < 1e-3
    assert self_check(model).bit_equal
