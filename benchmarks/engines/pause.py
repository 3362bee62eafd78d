"""How long the tier's poll is to pause while work is under way (PAUSE_SECONDS): first tokens and steps for several pauses, in one engine.

    python benchmarks/engines/pause.py --engine PYTHON [--rounds N] [--shared] [--json [FILE]]

One engine process stores prompts, a second one loads each of them once, under pauses that take turns: alone, so that the scheduler has
nothing else to do, and beside a request that decodes. The service puts rows into the pool by itself, or, with --shared, the tier copies
them from shared memory.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "clients")]

from benchmarks.engines.run import MODEL_TOKENS, POOL_BYTES, asked, first_token, prompt  # noqa: E402
from kvstore.cli.output import add_json_flag, check_json_target, emit, table  # noqa: E402
from tests.engines.models import WIDE_ROWS, make_model  # noqa: E402
from tests.engines.running import Engine  # noqa: E402
from tests.support.service import ServiceProcess  # noqa: E402

PAUSES = (0.0, 0.00005, 0.0001, 0.0002)
LENGTH = 2000
ROWS = LENGTH // 32
BACKGROUND = 200
STORE_SECONDS = 120.0


def store(engine: Engine, count: int) -> None:
    for number in range(count):
        engine.script([asked(f"cold{number}", prompt(number, LENGTH), count=1)])
    end = time.monotonic() + STORE_SECONDS
    while engine.figures().get("rows_stored", 0) < count * ROWS:
        if time.monotonic() > end:
            raise RuntimeError(
                f"{engine.figures().get('rows_stored', 0):.0f} rows of {count * ROWS} are stored"
            )
        # The tier is polled in steps.
        engine.script([asked("settle", prompt(7, 8), count=20)])


def loaded(engine: Engine, number: int, pause: float) -> dict[str, float]:
    """Of prompts `number` and the one after it, alone and beside another request."""
    engine.set_pause(pause)
    alone = first_token(engine.script([asked("alone", prompt(number, LENGTH), count=1)]), "alone")
    steps = engine.script(
        [
            asked("background", prompt(800 + number, 8), count=BACKGROUND),
            asked("long", prompt(number + 1, LENGTH), at=5, count=1),
        ]
    )
    last = next(at for at, (_, names) in enumerate(steps) if "long" in names)
    beside = [seconds for seconds, names in steps[6:last] if names == ["background"]]
    idle = [seconds for seconds, names in steps[last + 1 :] if names == ["background"]]
    return {
        "alone": alone,
        "beside": sum(seconds for seconds, _ in steps[5 : last + 1]),
        **({"step": statistics.median(beside)} if beside else {}),
        **({"idle": statistics.median(idle)} if idle else {}),
    }


def measure(python: Path, rounds: int, folder: Path, *, shared: bool) -> dict[float, list[dict[str, float]]]:
    model = make_model(folder, "wide-rows", WIDE_ROWS)
    options: dict[str, Any] = {
        "pool_bytes": POOL_BYTES,
        "model_tokens": MODEL_TOKENS,
        "pool_file": not shared,
    }
    count = 2 * (rounds * len(PAUSES) + 1)
    found: dict[float, list[dict[str, float]]] = {pause: [] for pause in PAUSES}
    with ServiceProcess(folder / "kv", disk=8 << 30, segment=64 << 20, staging=256 << 20, cache=512 << 20):
        address = str(folder / "kv")
        with Engine(python, model, folder / "engine.log", address=address, **options) as engine:
            store(engine, count)
        with Engine(python, model, folder / "engine.log", address=address, **options) as engine:
            # What comes first is slower, whatever the pause.
            loaded(engine, count - 2, PAUSES[-1])
            number = 0
            for turn in range(rounds):
                for pause in PAUSES[turn % len(PAUSES) :] + PAUSES[: turn % len(PAUSES)]:
                    found[pause].append(loaded(engine, number, pause))
                    number += 2
                    print(f"{1000 * pause:g} ms: {found[pause][-1]}", file=sys.stderr, flush=True)
    return found


def cell(rows: list[dict[str, float]], name: str) -> str:
    values = sorted(1000 * row[name] for row in rows if name in row)
    if not values:
        return "-"
    return f"{statistics.median(values):.1f} ms [{values[0]:.1f}, {values[-1]:.1f}]"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", type=Path, required=True, help="interpreter of an environment with vLLM")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each pause (default 5)")
    parser.add_argument("--shared", action="store_true", help="the tier is told pool_file: false")
    add_json_flag(parser)
    args = parser.parse_args()
    check_json_target(args)
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-pause-") as folder:
        found = measure(args.engine, args.rounds, Path(folder), shared=args.shared)
    names = ("alone", "beside", "step", "idle")
    emit(
        args,
        {
            "rounds": args.rounds,
            "tokens": LENGTH,
            "pauses": {str(pause): rows for pause, rows in found.items()},
        },
        table(
            [
                (f"{1000 * pause:g} ms", *(cell(rows, name) for name in names))
                for pause, rows in found.items()
            ],
            head=(
                "pause",
                f"first token of {LENGTH} tokens, alone",
                "beside a request",
                "its step meanwhile",
                "its step afterwards",
            ),
        ),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
