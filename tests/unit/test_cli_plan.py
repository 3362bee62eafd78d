from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kvstore.cli.plan_report import Explained, as_json, as_text
from kvstore.cli.prompt import parse_keys, parse_tokens, prompt_of_tokens
from kvstore.errors import InvalidArgument
from kvstore.plan import Costs, Coverage, plan, ways
from kvstore.plan.explain import (
    difference,
    held_under,
    in_words,
    kept_bytes,
    policies_to_compare,
    what_if,
)
from kvstore.policy.window import WindowPolicy
from kvstore.prefix.keys import block_keys
from kvstore.profile.base import Layer, LayerKind
from kvstore.profile.registry import PROFILES, get_profile
from kvstore.types import StateSource

TINY = get_profile("tiny")
FLASH = get_profile("deepseek-v4-flash")
B = TINY.block_tokens
RATES = Costs(seconds_per_index_entry=1e-8)


def policy(text: str, profile=TINY) -> WindowPolicy:
    return WindowPolicy.parse(text, profile)


def explained(coverage: Coverage, n: int, *, text: str = "endpoints", next_tokens: int = B) -> Explained:
    found = plan(TINY, coverage, prompt_tokens=n, costs=RATES, policy=policy(text))
    return Explained(
        namespace="chat",
        profile=TINY,
        policy=policy(text),
        prompt_tokens=n,
        blocks_held=coverage.blocks,
        blocks_in_flight=2,
        in_flight_seconds=1.5,
        coverage=coverage,
        costs=RATES,
        exactness=found.exactness,
        chosen=found.chosen,
        runner_up=found.runner_up,
        ways=ways(TINY, coverage, prompt_tokens=n, costs=RATES),
        save_states=found.save_states,
        next_tokens=next_tokens,
        outlooks=what_if(
            TINY,
            policies_to_compare(TINY, policy(text)),
            prompt_tokens=n,
            next_tokens=B,
            costs=RATES,
        ),
    )


# ---- what each policy would give ---------------------------------------------------------------------------------


def test_each_policy_keeps_what_its_states_weigh() -> None:
    n = 100 * 128 + 5
    bytes_of = {
        text: kept_bytes(policy(text, FLASH), FLASH, prompt_tokens=n)
        for text in ("zero", "endpoints", "periodic:2048", "periodic:128", "full", "full+overlap")
    }
    assert bytes_of == {
        "zero": 0,
        "endpoints": FLASH.state_bytes,
        "periodic:2048": 6 * FLASH.state_bytes,
        "periodic:128": 100 * FLASH.state_bytes,
        "full": 100 * FLASH.rows_block_bytes,
        "full+overlap": 100 * FLASH.rows_overlap_block_bytes,
    }


def test_the_next_turn_resumes_from_exactly_what_the_policy_kept() -> None:
    n, size = 100 * 128 + 5, 128
    texts = ("zero", "endpoints", "periodic:2048", "full", "full+overlap")
    found = what_if(
        FLASH,
        [policy(text, FLASH) for text in texts],
        prompt_tokens=n,
        next_tokens=1000,
        costs=Costs(),
    )
    turns = {str(each.policy): each.next_turn for each in found}
    assert {text: way.state_source for text, way in turns.items()} == {
        "zero": StateSource.REPLAY,
        "endpoints": StateSource.CHECKPOINT,
        "periodic:2048": StateSource.CHECKPOINT,
        "full": StateSource.ROWS,
        "full+overlap": StateSource.ROWS,
    }
    assert {text: way.replay_tokens for text, way in turns.items()} == {
        "zero": FLASH.exact_replay_tokens,
        "endpoints": 0,
        # The last state is at 12,288; from there to the last block's end.
        "periodic:2048": 100 * size - 12_288,
        "full": 4,
        "full+overlap": 0,
    }
    for each in found:
        assert each.next_turn.compute_from == 100 * size
        assert each.restore_seconds == each.next_turn.read_seconds + each.next_turn.replay_seconds
        alone = plan(
            FLASH,
            held_under(each.policy, FLASH, prompt_tokens=n),
            prompt_tokens=n + 1000,
            costs=Costs(),
            policy=each.policy,
        )
        assert alone.chosen == each.next_turn
    restores = {str(each.policy): each.restore_seconds for each in found}
    assert restores["zero"] > restores["periodic:2048"] > restores["full"] > restores["endpoints"]


def test_rows_of_a_model_without_overlap_are_all_that_a_resume_needs() -> None:
    plain = replace(TINY, name="plain", layers=(Layer(LayerKind.WINDOW), Layer(LayerKind.HCA, 16)))
    held = held_under(policy("full", plain), plain, prompt_tokens=5 * B)
    assert (held.rows, held.rows_overlap) == ((), (5 * B,))
    assert held_under(policy("full"), TINY, prompt_tokens=5 * B).rows == (5 * B,)
    assert held_under(policy("full"), TINY, prompt_tokens=B - 1) == Coverage(0)


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES.keys())
def test_every_kind_of_policy_is_compared_the_current_one_too(profile) -> None:
    odd = 3 * profile.block_tokens
    compared = policies_to_compare(profile, policy(f"periodic:{odd}", profile))
    assert len(set(compared)) == len(compared)
    assert policy(f"periodic:{odd}", profile) in compared
    assert {str(each).partition(":")[0] for each in compared} == {
        "zero",
        "endpoints",
        "periodic",
        "full",
        "full+overlap",
    }


# ---- words -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("coverage", "words"),
    [
        (Coverage(8, (8 * B,)), ("8 blocks", "the state at 256 comes from the pool", "nothing is replayed")),
        (Coverage(8, (), (8 * B,)), ("the state at 256 comes from SSD", "the last 10 tokens")),
        (Coverage(8, rows=(8 * B,)), ("window rows from SSD", "at 252", "4 tokens from 252")),
        (Coverage(8), ("75 tokens from 181", "window state back")),
        (Coverage(0), ("Nothing is restored", "all 266 tokens")),
    ],
)
def test_a_plan_is_said_in_one_sentence(coverage: Coverage, words: tuple[str, ...]) -> None:
    way = plan(TINY, coverage, prompt_tokens=8 * B + 10, costs=RATES, policy=policy("zero")).chosen
    said = in_words(TINY, way, prompt_tokens=8 * B + 10)
    assert said.endswith(".")
    for word in words:
        assert word in said


def test_a_difference_is_the_sum_of_its_parts() -> None:
    found = plan(TINY, Coverage(8, (6 * B,)), prompt_tokens=8 * B + 10, costs=RATES, policy=policy("zero"))
    assert found.runner_up is not None
    more = difference(found.chosen, found.runner_up)
    assert more.seconds == pytest.approx(found.runner_up.seconds - found.chosen.seconds)
    assert more.seconds == pytest.approx(sum(seconds for _, seconds in more.parts))


def test_the_report_names_what_is_held_chosen_refused_and_saved() -> None:
    e = explained(Coverage(8, (6 * B,), (8 * B,), branch_at=8 * B), 10 * B + 10)
    said = as_text(e)
    assert e.runner_up is not None
    for words in (
        "8 of 10 blocks: 256 tokens",
        "2 blocks after those",
        "1.5 s",
        "a state at 192",
        "at 256 the prompt leaves what is held",
        "CHECKPOINT, EXACT",
        f"The runner-up, {e.runner_up.state_source} from {e.runner_up.compute_from}",
        "longer",
        "Computing everything takes",
        "States in the pool at 320; on SSD at 320.",
        "20 us per layer-token",
        "10 ns per index entry",
        "500 MB/s from SSD",
    ):
        assert words in said, words
    for way in e.ways:
        assert f"{way.seconds * 1e3:,.3f}" in said
    assert said.count("chosen") == said.count("now") == 1
    for outlook in e.outlooks:
        assert f"{outlook.bytes_ssd:,}" in said


def test_the_document_has_every_price_and_every_policy() -> None:
    e = explained(Coverage(8, (6 * B,), (8 * B,)), 10 * B + 10)
    document = json.loads(json.dumps(as_json(e)))
    assert document["chosen"]["state_source"] == "CHECKPOINT"
    assert document["ways"][0] == document["chosen"]
    assert document["runner_up_costs_more"]["seconds"] > 0
    for way in document["ways"]:
        assert way["seconds"] == pytest.approx(
            way["read_seconds"] + way["replay_seconds"] + way["compute_seconds"]
        )
        assert way["compute_layer_tokens"] == (10 * B + 10 - way["compute_from"]) * TINY.layer_count
    assert document["cold_seconds"] == document["ways"][-1]["seconds"]
    assert [each["policy"] for each in document["policies"]] == [str(o.policy) for o in e.outlooks]
    assert all(each["next_turn"]["tokens_added"] == B for each in document["policies"])
    short = as_json(explained(Coverage(0), 10, next_tokens=0))
    assert all("next_turn" not in each for each in short["policies"])
    assert short["runner_up"] is None


def test_a_long_list_of_states_is_counted_not_listed() -> None:
    edges = tuple(B * i for i in range(1, 41))
    said = as_text(explained(Coverage(40, edges, edges), 40 * B + 1))
    assert "40 states, the last at 1,120, 1,152, 1,184, 1,216, 1,248, 1,280" in said


# ---- prompts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("[1, 2, 3]", [1, 2, 3]),
        ('{"tokens": [4, 0], "other": 1}', [4, 0]),
        ("1 2\n3\t4", [1, 2, 3, 4]),
        ("1,2, 3,\n", [1, 2, 3]),
        ("  \n", []),
        ("[]", []),
        ("4294967295", [4294967295]),
    ],
)
def test_tokens_are_read_as_people_write_them(text: str, tokens: list[int]) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("[1, 2", "--tokens"),
        ('{"token": [1]}', "--tokens"),
        ('{"tokens": 7}', "--tokens"),
        ("[1, true]", "tokens[1]"),
        ("[1, 2.0]", "tokens[1]"),
        ('["1"]', "tokens[0]"),
        ("1 two", "tokens[1]"),
        ("1 -2", "tokens[1]"),
        ("1,,x", "tokens[1]"),
        ("[" * 100_000, "--tokens"),
        ("٣", "tokens[0]"),
    ],
)
def test_what_is_no_token_is_refused_by_its_place(text: str, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_tokens(text)
    assert caught.value.field == field


def test_a_token_out_of_range_is_refused_by_its_place() -> None:
    with pytest.raises(InvalidArgument) as caught:
        prompt_of_tokens([1, 2**32], root=bytes(32), block_tokens=2)
    assert caught.value.field == "tokens[1]"


def test_keys_read_back_are_those_of_the_tokens() -> None:
    prompt = prompt_of_tokens(list(range(3 * B + 1)), root=bytes(32), block_tokens=B)
    assert prompt.tokens == 3 * B + 1
    assert prompt.keys == block_keys(bytes(32), range(3 * B + 1), block_tokens=B)
    assert parse_keys("\n".join(key.hex() for key in prompt.keys) + "\n") == prompt.keys
    assert parse_keys("") == []
    with pytest.raises(InvalidArgument) as caught:
        parse_keys(prompt.keys[0].hex() + ", abc")
    assert caught.value.field == "keys[1]"
