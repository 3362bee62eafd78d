"""Known rates of public traces; KVSTORE_TRACES says where they lie."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

from kvstore.simulate.formats import LoadedLog, load_log
from kvstore.simulate.study import Question, Study
from kvstore.units import parse_time
from tests.support.long import long

pytestmark = pytest.mark.slow

CHAT_LOG = "mooncake_conversation.jsonl.gz"
SIZES = ("1%", "3%", "10%", "30%")

# Token hit rates in percent, by size.
CHAT = {
    "lru": (5.35, 12.81, 28.44, 36.48),
    "fifo": (5.35, 12.81, 28.42, 36.48),
    "belady": (25.12, 35.48, 37.36, 37.36),
    "infinite": (37.36, 37.36, 37.36, 37.36),
}
AGENTS = {
    "lru": (78.81, 94.68, 95.97, 96.05),
    "fifo": (78.81, 94.68, 95.97, 96.05),
    "belady": (87.73, 95.87, 96.06, 96.06),
    "infinite": (96.06, 96.06, 96.06, 96.06),
}


@pytest.fixture(autouse=True)
def without_collections() -> Iterator[None]:
    """A simulation makes millions of objects and no circle among them; looking for circles takes a sixth of its time."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@cache
def loaded(path: Path, group: int) -> LoadedLog:
    return load_log([path], group=group)


def trace(require, name: str, *, group: int = 1) -> LoadedLog:
    folder = os.environ.get("KVSTORE_TRACES", "")
    path = Path(folder) / name
    require("traces", bool(folder) and path.is_file(), f"KVSTORE_TRACES={folder!r} has no {name}")
    return loaded(path, group)


# Each for itself, so that two processes share the work.
@pytest.mark.parametrize(
    ("policy", "sizes"),
    [(name, [size]) for name in ("lru", "fifo", "belady") for size in SIZES] + [("infinite", SIZES)],
)
def test_chat_has_the_known_rates(require, policy: str, sizes: Sequence[str]) -> None:
    chat = trace(require, CHAT_LOG)
    assert (len(chat.log), chat.log.footprint) == (12_031, 182_790)
    for row in Study(chat, Question(policies=[policy], sizes=sizes)).rows():
        expected = CHAT[policy][SIZES.index(row.size)]
        assert row.outcome.token_hit_rate == pytest.approx(expected, abs=0.15), row.size


@pytest.mark.parametrize(
    ("policy", "size"),
    [
        ("infinite", "10%"),
        *(
            (policy, size) if size == "10%" else long(policy, size)
            for policy in ("lru", "belady", "fifo")
            for size in SIZES
        ),
    ],
)
def test_agents_have_the_known_rates(require, policy: str, size: str) -> None:
    agents = trace(require, "claude_code_a.jsonl.gz", group=8)
    assert (len(agents.log), agents.log.block_tokens) == (22_818, 512)
    [row] = Study(agents, Question(policies=[policy], sizes=[size])).rows()
    assert row.outcome.token_hit_rate == pytest.approx(AGENTS[policy][SIZES.index(size)], abs=0.15)


CHAT_TTL = {"1m": (10.5, 2.5), "5m": (29.3, 10.3), "15m": (36.2, 24.7), "1h": (37.4, 51.5)}


@pytest.mark.parametrize("text", ["5m", *(long(text) for text in CHAT_TTL if text != "5m")])
def test_chat_has_the_known_rates_under_retentions(require, text: str) -> None:
    chat = trace(require, CHAT_LOG)
    [row] = Study(chat, Question(ttl=[(text, parse_time(text, name="--ttl"))])).rows()
    rate, held = CHAT_TTL[text]
    assert row.outcome.token_hit_rate == pytest.approx(rate, abs=0.3)
    assert 100 * row.outcome.held_blocks_mean / chat.log.footprint == pytest.approx(held, abs=0.3)


CHAT_WINDOWS = {
    "endpoints-only": (35.0, 1.8),
    "endpoints": (35.9, 1.8),
    "periodic:2048": (32.1, 3.7),
    "periodic:8192": (24.0, 0.7),
    "periodic:32768": (8.3, 0.07),
    "endpoints+periodic:8192": (36.6, 2.5),
}


@pytest.mark.parametrize(
    "windows", ["endpoints", *(long(each) for each in CHAT_WINDOWS if each != "endpoints")]
)
def test_chat_has_the_known_rates_under_window_states(require, windows: str) -> None:
    chat = trace(require, CHAT_LOG)
    [row] = Study(chat, Question(windows=[windows])).rows()
    rate, states = CHAT_WINDOWS[windows]
    assert row.outcome.token_hit_rate == pytest.approx(rate, abs=0.3)
    assert row.outcome.states_stored / len(chat.log) == pytest.approx(states, abs=0.06)
