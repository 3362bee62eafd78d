from __future__ import annotations

import pytest

from kvstore.errors import InvalidArgument
from kvstore.plan import SaveStates
from kvstore.plan.save import save_states
from kvstore.policy.window import WindowPolicy, last_usable_edge
from kvstore.profile.registry import get_profile

TINY = get_profile("tiny")
B = TINY.block_tokens


@pytest.mark.parametrize("text", ["zero", "endpoints", f"periodic:{B}", f"periodic:{64 * B}"])
def test_a_policy_reads_back_as_it_was_written(text: str) -> None:
    assert str(WindowPolicy.parse(text, TINY)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "full",
        "Zero",
        "periodic",
        "periodic:",
        "periodic:0",
        "periodic:-32",
        "periodic:33",
        "periodic:032",
        "periodic:32 ",
        "periodic:32.0",
        "zero:1",
        "periodic:٣٢",
        "periodic:" + "9" * 30,
    ],
)
def test_other_policies_are_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        WindowPolicy.parse(text, TINY)
    assert caught.value.field == "policy"
    assert caught.value.value == text
    assert f"multiple of {B}" in caught.value.allowed


@pytest.mark.parametrize(
    ("tokens", "edge"),
    [(0, 0), (1, 0), (B, 0), (B + 1, B), (2 * B, B), (2 * B + 1, 2 * B), (10 * B - 1, 9 * B)],
)
def test_the_last_usable_edge_leaves_a_token_to_compute(tokens: int, edge: int) -> None:
    assert last_usable_edge(TINY, tokens) == edge


def saved(policy: str, tokens: int, compute_from: int, *, rebuilt: bool = False) -> SaveStates:
    return save_states(
        WindowPolicy.parse(policy, TINY),
        TINY,
        prompt_tokens=tokens,
        compute_from=compute_from,
        rebuilt=rebuilt,
    )


CASES = [
    # policy, tokens, compute_from, rebuilt, pool, ssd
    ("zero", 10 * B, 0, False, (9 * B,), ()),
    ("endpoints", 10 * B, 0, False, (9 * B,), (9 * B,)),
    ("endpoints", 10 * B + 1, 0, False, (10 * B,), (10 * B,)),
    ("endpoints", 10 * B, 9 * B, False, (), ()),
    ("endpoints", 10 * B, 9 * B, True, (9 * B,), (9 * B,)),
    ("endpoints", 10 * B, 4 * B, True, (4 * B, 9 * B), (9 * B,)),
    ("zero", 10 * B, 4 * B, True, (4 * B, 9 * B), ()),
    (f"periodic:{4 * B}", 10 * B, 0, False, (9 * B,), (4 * B, 8 * B)),
    (f"periodic:{4 * B}", 12 * B, 4 * B, False, (11 * B,), (8 * B, 12 * B)),
    (f"periodic:{4 * B}", 12 * B, 4 * B, True, (4 * B, 11 * B), (4 * B, 8 * B, 12 * B)),
    (f"periodic:{4 * B}", 12 * B, 5 * B, True, (5 * B, 11 * B), (8 * B, 12 * B)),
    ("endpoints", 0, 0, False, (), ()),
    ("endpoints", 1, 0, False, (), ()),
    ("endpoints", B, 0, False, (), ()),
    (f"periodic:{B}", B, 0, False, (), (B,)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_states_to_save_inside_the_prompt(
    case: tuple[str, int, int, bool, tuple[int, ...], tuple[int, ...]],
) -> None:
    policy, tokens, compute_from, rebuilt, pool, ssd = case
    states = saved(policy, tokens, compute_from, rebuilt=rebuilt)
    assert (states.pool, states.ssd) == (pool, ssd)


@pytest.mark.parametrize(
    ("policy", "on_ssd", "every"),
    [("zero", False, 0), ("endpoints", True, 0), (f"periodic:{2 * B}", False, 2 * B)],
)
def test_states_to_save_of_the_output(policy: str, on_ssd: bool, every: int) -> None:
    states = saved(policy, 5 * B, 0)
    assert states.output_edge_pool, "the pool keeps the output's last edge under every policy"
    assert (states.output_edge_ssd, states.every_tokens) == (on_ssd, every)
