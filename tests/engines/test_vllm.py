"""A real vLLM on the CPU with tiny models, and this store as its secondary tier. `make test-engines` runs it; it takes an environment
with vLLM, which KVSTORE_ENGINE_PYTHON names the interpreter of.

The engine's answers without anything in the store are the yardstick: whatever was loaded, lost or damaged, tokens and
log-probabilities are these.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from math import isclose
from pathlib import Path
from typing import Any

import pytest

from kvstore_client import CacheClient
from tests.engines.models import MODELS, make_model
from tests.engines.running import Answer, Engine, note
from tests.support.service import ServiceProcess, short_directory

PROMPT = 500
PYTHON = os.environ.get("KVSTORE_ENGINE_PYTHON", "")

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="needs an environment with vLLM: make test-engines"),
    pytest.mark.timeout(1800),
]


def prompt(number: int) -> list[int]:
    return [(place * (2 * number + 7) + number) % 1000 + 3 for place in range(PROMPT)]


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_model(tmp_path, request.param)


@pytest.fixture
def service() -> Iterator[ServiceProcess]:
    with short_directory() as directory:
        made = ServiceProcess(directory, disk=96 << 20, segment=2 << 20)
        try:
            yield made
        finally:
            if made._process is not None:
                made.kill()


@pytest.fixture
def start(model: Path, service: ServiceProcess, tmp_path: Path) -> Callable[..., Engine]:
    def made(**options: Any) -> Engine:
        return Engine(Path(PYTHON), model, tmp_path / "engine.log", address=str(service.directory), **options)

    return made


@pytest.fixture
def record(model: Path) -> Callable[..., None]:
    return partial(note, model.name)


def same(answer: Answer, yardstick: Answer) -> bool:
    """A product of the 20 rows that are left to compute may round otherwise than one of 500: the last digits are free."""
    return (answer.tokens, answer.why) == (yardstick.tokens, "length") and isclose(
        answer.logprob, yardstick.logprob, rel_tol=0.0, abs_tol=1e-5
    )


def until(engine: Engine, true: Callable[[dict[str, float]], bool], what: str) -> dict[str, float]:
    """The engine's figures, as soon as they are as they should be; each look lets it make a step."""
    end = time.monotonic() + 60
    while True:
        figures = engine.figures()
        if true(figures):
            return figures
        assert time.monotonic() < end, f"{what}: {figures}"
        engine.ask([5] * 8)


def test_the_short_of_it_cold_then_warm_then_without_the_service(
    start: Callable[..., Engine], service: ServiceProcess, record: Callable[..., None]
) -> None:
    service.start()
    with start() as engine:
        yardstick = [engine.ask(prompt(number)) for number in (1, 2)]
        assert [answer.cached for answer in yardstick] == [0, 0]
        until(engine, lambda found: found.get("rows_stored", 0) >= 30, "rows are stored")
    with start() as engine:
        warm = engine.ask(prompt(1))
        assert same(warm, yardstick[0])
        assert warm.cached == 480
        # The pool is a file, and the service itself has put all rows there.
        with CacheClient(service.directory, owner="admin") as admin:
            assert admin.stats()["dock_fetched_bytes_total"] >= 15 * 65_536
        service.kill()
        without = engine.ask(prompt(2))
        assert same(without, yardstick[1])
        assert without.cached == 0
        record("short", cached=warm.cached, **engine.figures())


def test_every_way_of_losing_the_store_costs_time_and_no_token(
    start: Callable[..., Engine], service: ServiceProcess, record: Callable[..., None]
) -> None:
    yardstick: dict[int, Answer] = {}

    # No service is there when the engine starts: everything is a miss. Then it comes, and is used.
    with start() as engine:
        yardstick[0] = engine.ask(prompt(0))
        assert yardstick[0].cached == 0
        figures = until(engine, lambda found: found.get("rows_store_failed", 0) > 0, "stores are refused")
        assert figures.get("rows_stored", 0) == 0
        service.start()
        until(engine, lambda found: found["keys_asked"] > 0, "it is asked")
        for number in (1, 2, 3):
            yardstick[number] = engine.ask(prompt(number))
        figures = until(engine, lambda found: found.get("rows_stored", 0) >= 45, "rows are stored")
        record("cold", cached=0, **figures)

    # A second process loads what the first one computed; then it is killed, while it stores.
    with start() as engine:
        for number in (1, 2):
            answer = engine.ask(prompt(number))
            assert same(answer, yardstick[number])
            assert answer.cached == 480
        figures = engine.figures()
        assert figures["rows_loaded"] >= 30
        record("warm", cached=answer.cached, **figures)
        engine.begin(prompt(4))
        yardstick[4] = engine.end()
        engine.begin(prompt(5))
        engine.kill()

    # The next one finds what was durable; the service is killed in the middle, comes back, and is used again.
    with start() as engine:
        answer = engine.ask(prompt(3))
        assert same(answer, yardstick[3])
        assert answer.cached == 480
        engine.begin(prompt(1))
        service.kill()
        assert same(engine.end(), yardstick[1])
        answer = engine.ask(prompt(4))
        assert same(answer, yardstick[4])
        assert answer.cached == 0
        record("service killed", cached=answer.cached, **engine.figures())
        service.start()
        before = engine.figures().get("rows_stored", 0)
        number = 10

        def stores_again(found: dict[str, float]) -> bool:
            nonlocal number
            number += 1
            yardstick[number] = engine.ask(prompt(number))
            return found.get("rows_stored", 0) > before

        until(engine, stores_again, "it is stored to again")
        # More than its disk holds: what goes, goes, and the service goes on.
        for number in range(100, 190):
            yardstick[number] = engine.ask(prompt(number))
        record("full", **engine.figures())

    # What is on the disk now is damaged, all of it.
    service.stop()
    flipped = flip_bytes(service.directory)
    assert flipped > 0
    service.start()
    with start() as engine:
        for number in (189, 188, 1):
            answer = engine.ask(prompt(number))
            assert same(answer, yardstick[number])
            assert answer.cached == 0
        figures = engine.figures()
        assert figures.get("rows_loaded", 0) == 0
        assert figures["rows_load_failed"] > 0
        record("damaged", flipped=flipped, **figures)


def flip_bytes(directory: Path) -> int:
    """Turn a bit in every 32 KiB, and so in every row, of everything that was ever written to segments; in how many places."""
    count = 0
    for path in sorted(directory.rglob("*")):
        if (
            not path.is_file()
            or path.stat().st_size < 1 << 20
            or "lmdb" in path.name
            or path.suffix == ".mdb"
        ):
            continue
        data = bytearray(path.read_bytes())
        for at in range(8192 + 1000, len(data), 32_768):
            if any(data[at - 64 : at + 64]):
                data[at] ^= 1
                count += 1
        path.write_bytes(data)
    return count
