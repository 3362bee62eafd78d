"""The status page: what a person who looks at a service is shown. It names no namespace and shows no key: the port asks
nobody who they are."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from kvstore.plan.base import Alternative
from kvstore.service.engine import Engine
from kvstore.service.figures import VERSION, figures

PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
"""What a browser lets the page load: nothing but its own figures."""


@cache
def page() -> bytes:
    """The page itself, whole: it fetches `status` as JSON from /status.json, and nothing else."""
    return files("kvstore.service").joinpath("status_page.html").read_bytes()


def status(engine: Engine) -> dict[str, Any]:
    """The figures, the last plans with what they were chosen over, and the slowest calls of late. Event loop's thread
    only."""
    now = engine.time.monotonic()
    return {
        "version": VERSION,
        "boot": engine.boot.hex(),
        "eviction": engine.core.eviction_name,
        "retention_seconds": engine.config.retention,
        "buffered_because": engine.log.buffered_because,
        "figures": figures(engine),
        "plans": [
            {
                "seconds_ago": now - at,
                "prompt_tokens": plan.prompt_tokens,
                "chosen": _way(plan.chosen),
                "runner_up": None if plan.runner_up is None else _way(plan.runner_up),
            }
            for at, plan in reversed(engine.plans)
        ],
        "slowest_calls": [
            {"call": each.name, "seconds": each.seconds, "seconds_ago": now - each.ended_mono}
            for each in engine.slow.longest()
        ],
    }


def _way(way: Alternative) -> dict[str, Any]:
    return {
        "state_source": way.state_source.value,
        "compute_from": way.compute_from,
        "replay_tokens": way.replay_tokens,
        "bytes_ssd": way.bytes_ssd,
        "bytes_memory": way.bytes_memory,
        "seconds": way.seconds,
    }
