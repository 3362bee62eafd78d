from __future__ import annotations

import pytest

from kvstore.errors import InvalidArgument, PolicyTooLarge
from kvstore.plan import Coverage, SaveStates
from kvstore.plan.save import save_states
from kvstore.policy.window import (
    WindowPolicy,
    check_share,
    last_usable_edge,
    prompt_states_bytes,
    share_tokens,
)
from kvstore.profile.registry import get_profile

TINY = get_profile("tiny")
FLASH = get_profile("deepseek-v4-flash")
B = TINY.block_tokens
LONGEST = 1 << 20


@pytest.mark.parametrize(
    "text",
    [
        "zero",
        "endpoints-only",
        "endpoints",
        f"periodic:{B}",
        f"periodic:{64 * B}",
        f"endpoints+periodic:{B}",
        "full",
        "full+overlap",
    ],
)
def test_a_policy_reads_back_as_it_was_written(text: str) -> None:
    assert str(WindowPolicy.parse(text, TINY)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Zero",
        "full ",
        "full+",
        "full:32",
        "overlap",
        "periodic",
        "endpoints+periodic",
        "endpoints+periodic:33",
        "endpoints-only:32",
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
    for name in ("zero", "endpoints", "periodic:N", "full", "full+overlap"):
        assert name in caught.value.allowed


@pytest.mark.parametrize(
    ("tokens", "edge"),
    [(0, 0), (1, 0), (B, 0), (B + 1, B), (2 * B, B), (2 * B + 1, 2 * B), (10 * B - 1, 9 * B)],
)
def test_the_last_usable_edge_leaves_a_token_to_compute(tokens: int, edge: int) -> None:
    assert last_usable_edge(TINY, tokens) == edge


def saved(
    policy: str,
    tokens: int,
    compute_from: int,
    *,
    rebuilt: bool = False,
    coverage: Coverage = Coverage(0),  # noqa: B008
) -> SaveStates:
    return save_states(
        WindowPolicy.parse(policy, TINY),
        TINY,
        prompt_tokens=tokens,
        coverage=coverage,
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
    ("endpoints-only", 10 * B, 0, False, (9 * B,), (9 * B,)),
    (f"endpoints+periodic:{4 * B}", 10 * B, 0, False, (9 * B,), (4 * B, 8 * B, 9 * B)),
    (f"endpoints+periodic:{3 * B}", 10 * B, 4 * B, False, (9 * B,), (6 * B, 9 * B)),
    ("full", 10 * B, 0, False, (9 * B,), ()),
    ("full+overlap", 10 * B, 4 * B, True, (4 * B, 9 * B), ()),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_states_to_save_inside_the_prompt(
    case: tuple[str, int, int, bool, tuple[int, ...], tuple[int, ...]],
) -> None:
    policy, tokens, compute_from, rebuilt, pool, ssd = case
    states = saved(policy, tokens, compute_from, rebuilt=rebuilt)
    assert (states.pool, states.ssd) == (pool, ssd)


BRANCHES = [
    # policy, compute_from, rebuilt, branch_at, pool, ssd; the prompt has ten blocks.
    ("endpoints", 0, False, 4 * B, (4 * B, 9 * B), (4 * B, 9 * B)),
    ("endpoints", 4 * B, True, 4 * B, (4 * B, 9 * B), (4 * B, 9 * B)),
    ("endpoints", 4 * B, False, 4 * B, (9 * B,), (9 * B,)),
    ("endpoints", 2 * B, True, 4 * B, (2 * B, 4 * B, 9 * B), (4 * B, 9 * B)),
    ("endpoints", 0, False, 9 * B, (9 * B,), (9 * B,)),
    ("endpoints", 6 * B, True, 4 * B, (6 * B, 9 * B), (9 * B,)),
    ("endpoints-only", 0, False, 4 * B, (4 * B, 9 * B), (9 * B,)),
    (f"endpoints+periodic:{5 * B}", 0, False, 4 * B, (4 * B, 9 * B), (4 * B, 5 * B, 9 * B, 10 * B)),
    ("zero", 0, False, 4 * B, (4 * B, 9 * B), ()),
    ("full", 4 * B, True, 4 * B, (4 * B, 9 * B), ()),
    (f"periodic:{5 * B}", 0, False, 4 * B, (4 * B, 9 * B), (5 * B, 10 * B)),
]


@pytest.mark.parametrize("case", BRANCHES, ids=str)
def test_a_branch_point_is_saved_in_the_pool_and_under_endpoints_on_ssd(
    case: tuple[str, int, bool, int, tuple[int, ...], tuple[int, ...]],
) -> None:
    policy, compute_from, rebuilt, branch_at, pool, ssd = case
    states = saved(
        policy, 10 * B, compute_from, rebuilt=rebuilt, coverage=Coverage(branch_at // B, branch_at=branch_at)
    )
    assert (states.pool, states.ssd) == (pool, ssd)


def test_a_state_that_a_tier_holds_is_not_saved_there_again() -> None:
    pooled = saved("endpoints", 10 * B, 0, coverage=Coverage(9, pool_states=(9 * B,)))
    assert (pooled.pool, pooled.ssd) == ((), (9 * B,))
    kept = saved(f"periodic:{3 * B}", 10 * B, 2 * B, coverage=Coverage(9, checkpoints=(B, 3 * B, 9 * B)))
    assert (kept.pool, kept.ssd) == ((9 * B,), (6 * B,))
    rebuilt = saved(
        "endpoints", 10 * B, 4 * B, rebuilt=True, coverage=Coverage(4, (4 * B,), (4 * B,), branch_at=4 * B)
    )
    assert (rebuilt.pool, rebuilt.ssd) == ((9 * B,), (9 * B,))


@pytest.mark.parametrize(
    ("policy", "on_ssd", "every", "rows", "overlap"),
    [
        ("zero", False, 0, False, False),
        ("endpoints", True, 0, False, False),
        ("endpoints-only", True, 0, False, False),
        (f"endpoints+periodic:{2 * B}", True, 2 * B, False, False),
        (f"periodic:{2 * B}", False, 2 * B, False, False),
        ("full", False, 0, True, False),
        ("full+overlap", False, 0, True, True),
    ],
)
def test_states_to_save_of_the_output(
    policy: str, on_ssd: bool, every: int, rows: bool, overlap: bool
) -> None:
    states = saved(policy, 5 * B, 0)
    assert states.output_edge_pool, "the pool keeps the output's last edge under every policy"
    assert (states.output_edge_ssd, states.every_tokens) == (on_ssd, every)
    assert (states.rows, states.rows_overlap) == (rows, overlap)


STATE = FLASH.state_bytes
ROWS, ROWS_OVERLAP = FLASH.rows_block_bytes, FLASH.rows_overlap_block_bytes
SHARES = [
    # policy, share in bytes, tokens it holds, whether one prompt of LONGEST tokens fits
    ("zero", 0, 0, True),
    ("endpoints", 3 * STATE, LONGEST, True),
    ("endpoints", 3 * STATE - 1, 0, False),
    ("endpoints", 7 * STATE, 2 * LONGEST, True),
    ("endpoints-only", 2 * STATE, LONGEST, True),
    ("endpoints-only", 2 * STATE - 1, 0, False),
    ("endpoints+periodic:8192", 131 * STATE, LONGEST, True),
    ("endpoints+periodic:8192", 131 * STATE - 1, 0, False),
    ("periodic:2048", 512 * STATE, LONGEST, True),
    ("periodic:2048", 512 * STATE - 1, 511 * 2048, False),
    # 1,048,576 / 3,072 is 341 and a third: 341 states are all that the longest prompt has.
    ("periodic:3072", 341 * STATE, 341 * 3072, True),
    ("periodic:3072", 341 * STATE - 1, 340 * 3072, False),
    ("full", 8192 * ROWS, LONGEST, True),
    ("full", 8192 * ROWS - 1, 8191 * 128, False),
    ("full+overlap", 8192 * ROWS, (8192 * ROWS // ROWS_OVERLAP) * 128, False),
    ("full+overlap", 8192 * ROWS_OVERLAP, LONGEST, True),
]


@pytest.mark.parametrize("case", SHARES, ids=str)
def test_a_policy_fits_the_states_share_or_is_refused_with_the_arithmetic(
    case: tuple[str, int, int, bool],
) -> None:
    text, share, tokens, fits = case
    policy = WindowPolicy.parse(text, FLASH)
    assert share_tokens(policy, FLASH, share_bytes=share, longest_tokens=LONGEST) == tokens
    assert (prompt_states_bytes(policy, FLASH, LONGEST) <= share) is fits
    if fits:
        check_share(policy, FLASH, share_bytes=share, longest_tokens=LONGEST)
        return
    with pytest.raises(PolicyTooLarge) as caught:
        check_share(policy, FLASH, share_bytes=share, longest_tokens=LONGEST)
    said = str(caught.value)
    assert caught.value.field == "policy"
    for number in (share, tokens, prompt_states_bytes(policy, FLASH, LONGEST)):
        assert f"{number:,}" in said
    assert f"policy={text}" in said
    assert "`states_share`" in said


@pytest.mark.parametrize("share_states", [1, 2, 3, 7, 100, 511, 8191])
def test_the_periodic_policy_that_a_refusal_offers_fits_and_a_denser_one_does_not(share_states: int) -> None:
    share = share_states * STATE
    with pytest.raises(PolicyTooLarge) as caught:
        check_share(
            WindowPolicy.parse("periodic:128", FLASH), FLASH, share_bytes=share, longest_tokens=LONGEST
        )
    least = int(caught.value.allowed.partition("N >= ")[2].split(",")[0].split(";")[0])
    check_share(
        WindowPolicy.parse(f"periodic:{least}", FLASH), FLASH, share_bytes=share, longest_tokens=LONGEST
    )
    with pytest.raises(PolicyTooLarge):
        check_share(
            WindowPolicy.parse(f"periodic:{least - 128}", FLASH),
            FLASH,
            share_bytes=share,
            longest_tokens=LONGEST,
        )
