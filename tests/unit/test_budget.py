"""One memory budget: what there is, by the cgroups that this process is in, and how it is shared out."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.budget import FETCH_BYTES_MIN, POINTS, Available, available, share_out
from kvstore.config import ServiceConfig
from kvstore.errors import ConfigError

GIB = 1 << 30
PLENTY = Available(64 * GIB, "RAM")


def cgroups(root: Path, own: str, limits: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(own)
    for name, text in limits.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("own", "limits", "want"),
    [
        (
            "0::/a/b\n",
            {"memory.max": "max\n", "a/memory.max": "3000000\n", "a/b/memory.max": "max\n"},
            3_000_000,
        ),
        ("0::/a/b\n", {"a/memory.max": "3000000\n", "a/b/memory.max": "2000000\n"}, 2_000_000),
        ("0::/\n", {"memory.max": "1000000\n", "a/memory.max": "10\n"}, 1_000_000),
        ("0::/seen/by/the/host\n", {"memory.max": "1000000\n"}, 1_000_000),
        ("0::/../../x\n", {"memory.max": "1000000\n"}, 1_000_000),
        ("0::/a\n1:memory:/m\n", {"memory/m/memory.limit_in_bytes": "5000000\n"}, 5_000_000),
        ("0::/a\n", {"unified/a/memory.max": "6000000\n"}, 6_000_000),
    ],
    ids=["nested", "own", "root", "host path", "outside", "version 1", "hybrid"],
)
def test_the_lowest_limit_on_the_way_up_counts(
    tmp_path: Path, own: str, limits: dict[str, str], want: int
) -> None:
    found = available(cgroups(tmp_path, own, limits))
    assert found.bytes == want
    assert str(tmp_path) in found.because


@pytest.mark.parametrize("limit", ["max", "9223372036854771712", "", "no number"])
def test_without_a_limit_it_is_all_of_ram(tmp_path: Path, limit: str) -> None:
    assert available(cgroups(tmp_path, "0::/\n", {"memory.max": limit})).because == "RAM"
    assert available(tmp_path / "nothing").because == "RAM"


def test_the_default_is_a_quarter_and_its_parts_are_all_of_it() -> None:
    parts = share_out(0, {}, PLENTY)
    assert parts.memory == 16 * GIB
    assert 0.97 * parts.memory < parts.sum <= parts.memory
    # Ten points of 25 for states, of which handoffs have one; ten for blocks; five for what is on its way.
    assert abs((parts.pool + parts.handoff) / parts.memory - 0.4) < 1e-6
    assert abs(parts.cache / parts.memory - 0.4) < 1e-6


def test_a_single_option_counts_instead_of_its_part() -> None:
    parts = share_out(GIB, {"cache": 1 << 20, "pool": 0}, PLENTY)
    assert (parts.cache, parts.pool) == (1 << 20, GIB * 18 // 50)


@pytest.mark.parametrize(
    ("memory", "given", "field"),
    [
        (GIB, {"cache": GIB}, "--memory"),
        (FETCH_BYTES_MIN, {}, "--memory"),
        (65 * GIB, {}, "--memory"),
        (GIB, {"pool": 65 * GIB}, "--pool"),
        (0, {"cache": 17 * GIB}, "--memory"),
    ],
)
def test_more_than_there_is_is_refused_by_name(memory: int, given: dict[str, int], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        share_out(memory, given, PLENTY)
    assert caught.value.field == field


def test_a_configuration_tells_what_each_part_has() -> None:
    config = ServiceConfig(dir="/x", memory=GIB, handoff=5 << 20)
    assert config.handoff_bytes == 5 << 20
    assert config.cache_bytes == GIB * 20 // 50
    text = config.memory_text()
    assert "memory 1GiB of " in text
    assert "handoffs 5MiB" in text
    with pytest.raises(ConfigError, match="--memory"):
        _ = ServiceConfig(dir="/x", memory=GIB, pool=GIB).pool_bytes


def test_a_small_budget_is_shared_out_whole_though_fetches_have_a_least() -> None:
    parts = share_out(64 << 20, {}, Available(1 << 30, "RAM"))
    assert parts.fetch == FETCH_BYTES_MIN
    assert parts.cache == (60 << 20) * POINTS["cache"] // (sum(POINTS.values()) - POINTS["fetch"])
    assert 0 <= parts.memory - parts.sum < len(POINTS)
