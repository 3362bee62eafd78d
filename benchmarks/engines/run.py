"""vLLM's steps and first tokens with this store as its secondary tier, with vLLM's own file system tier, and with none.

    python benchmarks/engines/run.py --engine PYTHON [--rounds N] [--json [FILE]]

PYTHON is the interpreter of an environment with vLLM (`make bench-engines` makes one). Each turn is two engine processes on the CPU, the
second one with what the first has stored; the order of the contenders turns with each round. The model is tiny, its rows of 32 tokens
are of 1 MiB. Both tiers lie on the same file system; vLLM's own writes files and syncs none, this store's rows are durable.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "clients")]

from kvstore.bench.pairs import spread  # noqa: E402
from kvstore.cli.output import add_json_flag, check_json_target, emit, table  # noqa: E402
from tests.engines.models import WIDE_ROWS, make_model  # noqa: E402
from tests.engines.running import Engine  # noqa: E402
from tests.support.service import ServiceProcess  # noqa: E402

CONTENDERS = ("none", "fs", "kvstore")
LENGTHS = (500, 4000)
MODEL_TOKENS = 4608
POOL_BYTES = 512 << 20
BACKGROUND = 300
"""Tokens that a request computes one by one while others are stored and loaded."""
STORED_STEPS = 40
SETTLE_SECONDS = 10.0


def prompt(number: int, length: int) -> list[int]:
    return [(place * (2 * number + 7) + number) % 1000 + 3 for place in range(length)]


def asked(name: str, tokens: Sequence[int], *, at: int = 0, count: int = 2) -> dict[str, Any]:
    return {"name": name, "at": at, "tokens": list(tokens), "count": count}


def first_token(steps: Sequence[tuple[float, list[str]]], name: str) -> float:
    """Seconds from the first step until `name` has its first token."""
    last = next(number for number, (_, names) in enumerate(steps) if name in names)
    return sum(seconds for seconds, _ in steps[: last + 1])


def idle_step(engine: Engine) -> float:
    """Median of the steps of short requests, of which nothing is stored: none fills a row."""
    found = [engine.script([asked(f"idle{n}", prompt(900 + n, 8), count=20)])[1:] for n in range(15)]
    return statistics.median(seconds for steps in found for seconds, _ in steps)


def steps_beside(engine: Engine, number: int, *, is_held: bool) -> float | None:
    """Median of another request's steps while the rows of a long prompt are loaded, or stored after it was computed. None where it
    had no step alone, as when nothing is loaded."""
    steps = engine.script(
        [
            asked("background", prompt(800 + number, 8), count=BACKGROUND),
            asked("long", prompt(number, LENGTHS[-1]), at=5, count=1),
        ]
    )
    last = next(at for at, (_, names) in enumerate(steps) if "long" in names)
    # What computes the rest of the prompt is no step of the other request alone.
    beside = steps[6:last] if is_held else steps[last + 1 : last + 1 + STORED_STEPS]
    alone = [seconds for seconds, names in beside if names == ["background"]]
    return statistics.median(alone) if alone else None


def settle(engine: Engine) -> None:
    """Let the tier store what it has been given: it is polled in steps."""
    end = time.monotonic() + SETTLE_SECONDS
    number = 0
    while time.monotonic() < end:
        engine.script([asked(f"settle{number}", prompt(7, 8), count=20)])
        number += 1


def cold(engine: Engine) -> dict[str, float]:
    found = {"idle": idle_step(engine)}
    for number, length in enumerate(LENGTHS):
        name = f"cold{length}"
        found[name] = first_token(engine.script([asked(name, prompt(number, length))]), name)
    if (storing := steps_beside(engine, 10, is_held=False)) is not None:
        found["storing"] = storing
    settle(engine)
    return found


def warm(engine: Engine) -> dict[str, float]:
    """A process that has computed nothing: what it finds was stored by another."""
    found = {}
    for number, length in enumerate(LENGTHS):
        name = f"warm{length}"
        found[name] = first_token(engine.script([asked(name, prompt(number, length))]), name)
        found[f"cached{length}"] = engine.cached[name]
    if (loading := steps_beside(engine, 10, is_held=True)) is not None:
        found["loading"] = loading
    return found


@contextmanager
def tier_of(contender: str, folder: Path) -> Iterator[dict[str, Any]]:
    """How an engine is told of it."""
    if contender == "none":
        yield {"tier": {}}
    elif contender == "fs":
        yield {"tier": {"type": "fs", "root_dir": str(folder / "files")}}
    else:
        with ServiceProcess(
            folder / "kv", disk=4 << 30, segment=64 << 20, staging=256 << 20, cache=512 << 20
        ):
            yield {"address": str(folder / "kv")}


def turn(python: Path, contender: str, scratch: Path) -> dict[str, float]:
    folder = Path(tempfile.mkdtemp(prefix="kvstore-bench-engines-", dir=scratch))
    try:
        model = make_model(folder, "wide-rows", WIDE_ROWS)
        found: dict[str, float] = {}
        with tier_of(contender, folder) as told:
            for part in (cold, warm):
                with Engine(
                    python,
                    model,
                    folder / "engine.log",
                    pool_bytes=POOL_BYTES,
                    model_tokens=MODEL_TOKENS,
                    **told,
                ) as engine:
                    engine.script(
                        [asked("warm-up", prompt(99, 600)), asked("again", prompt(98, 8), count=20)]
                    )
                    found |= part(engine)
        return found
    finally:
        shutil.rmtree(folder)


def summary(turns: Sequence[tuple[str, dict[str, float]]]) -> dict[str, Any]:
    """Medians, with what each tier's step or first token is of that without a tier, round by round."""
    found: dict[str, Any] = {}
    base = [figures for contender, figures in turns if contender == "none"]
    for contender in CONTENDERS:
        mine = [figures for name, figures in turns if name == contender]
        rows: dict[str, Any] = {}
        for name in mine[0]:
            values = [figures[name] for figures in mine]
            rows[name] = {"median": statistics.median(values), "values": values}
            # Of steps and first tokens alike: beside what the engine does that has no tier at all.
            against = _AGAINST.get(name)
            if contender != "none" and against:
                ratios = [figures[name] / other[against] for figures, other in zip(mine, base, strict=True)]
                rows[name]["ratio"] = spread(ratios).as_json()
        found[contender] = rows
    return found


_AGAINST = {
    "idle": "idle",
    "storing": "storing",
    "loading": "idle",
    **{f"{kind}{length}": f"cold{length}" for kind in ("cold", "warm") for length in LENGTHS},
}


def text_of(found: dict[str, Any]) -> str:
    def cell(contender: str, name: str) -> str:
        row = found[contender].get(name)
        if row is None:
            return ""
        if name.startswith("cached"):
            return f"{row['median']:,.0f}"
        ratio = f" ({row['ratio']['median']:.2f})" if "ratio" in row else ""
        return f"{1000 * row['median']:.2f} ms{ratio}"

    rows = [
        (about, *(cell(contender, name) for contender in CONTENDERS))
        for name, about in (
            ("idle", "step, tier idle"),
            ("storing", "step, rows being stored"),
            ("loading", "step, rows being loaded"),
            *((f"cold{length}", f"first token of {length} tokens, nothing held") for length in LENGTHS),
            *((f"warm{length}", f"first token of {length} tokens, second run") for length in LENGTHS),
            *((f"cached{length}", f"tokens of {length} not computed") for length in LENGTHS),
        )
    ]
    return table(rows, head=("", *CONTENDERS))


def measure(python: Path, rounds: int, scratch: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    turns: list[tuple[str, dict[str, float]]] = []
    for number in range(rounds):
        order = CONTENDERS if number % 2 == 0 else CONTENDERS[::-1]
        for contender in order:
            found = turn(python, contender, scratch)
            turns.append((contender, found))
            tell(f"round {number + 1}, {contender}: " + ", ".join(f"{k} {v:.4g}" for k, v in found.items()))
    return {"rounds": rounds, "row_bytes": 1 << 20, "contenders": summary(turns)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", type=Path, required=True, help="interpreter of an environment with vLLM")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender (default 5)")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="where both tiers lie")
    add_json_flag(parser)
    args = parser.parse_args()
    check_json_target(args)
    found = measure(args.engine, args.rounds, args.dir, lambda text: print(text, file=sys.stderr, flush=True))
    emit(args, found, text_of(found["contenders"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
