"""The answer of `kvstore plan`: the same facts as text for people and as a JSON document."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from kvstore.cli.output import table
from kvstore.plan.base import Alternative, Costs, Coverage, SaveStates
from kvstore.plan.coverage import whole_blocks
from kvstore.plan.explain import Outlook, difference, in_words
from kvstore.policy.window import WindowPolicy
from kvstore.profile.base import Profile
from kvstore.types import Exactness, StateSource

EDGES_SHOWN = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """One lookup with all that it was decided from. `ways` has the chosen one first, NONE among them. `next_tokens`: what
    the next turn of `outlooks` adds; 0 where only the bytes that the policies keep are to be shown."""

    namespace: str
    profile: Profile
    policy: WindowPolicy
    prompt_tokens: int
    blocks_held: int
    blocks_in_flight: int
    in_flight_seconds: float
    coverage: Coverage
    costs: Costs
    exactness: Exactness
    chosen: Alternative
    runner_up: Alternative | None
    ways: tuple[Alternative, ...]
    save_states: SaveStates
    next_tokens: int
    outlooks: tuple[Outlook, ...]

    @property
    def cold(self) -> Alternative:
        return next(way for way in self.ways if way.state_source is StateSource.NONE)


def as_json(e: Explained) -> dict[str, Any]:
    runner_up = e.runner_up
    return {
        "namespace": e.namespace,
        "profile": e.profile.name,
        "policy": str(e.policy),
        "prompt_tokens": e.prompt_tokens,
        "block_tokens": e.profile.block_tokens,
        "blocks": whole_blocks(e.profile, e.prompt_tokens),
        "blocks_held": e.blocks_held,
        "blocks_in_flight": e.blocks_in_flight,
        "in_flight_seconds": e.in_flight_seconds,
        "coverage": e.coverage._asdict(),
        "exactness": e.exactness.value,
        "chosen": _way_json(e, e.chosen),
        "runner_up": _way_json(e, runner_up) if runner_up else None,
        "runner_up_costs_more": asdict(difference(e.chosen, runner_up)) if runner_up else None,
        "cold_seconds": e.cold.seconds,
        "ways": [_way_json(e, way) for way in e.ways],
        "save_states": e.save_states._asdict(),
        "policies": [_outlook_json(e, outlook) for outlook in e.outlooks],
        "rates": asdict(e.costs),
    }


def as_text(e: Explained) -> str:
    size, blocks = e.profile.block_tokens, whole_blocks(e.profile, e.prompt_tokens)
    title = (
        f"{e.namespace} ({e.profile.name}, {e.policy}): a prompt of {e.prompt_tokens:,} tokens, "
        f"{blocks:,} whole blocks of {size}"
    )
    return "\n".join(
        [
            title,
            "",
            *_labelled([*_held_lines(e), *_plan_lines(e)]),
            "",
            _ways_table(e),
            "",
            _policies_table(e),
            "Under endpoints a state is kept where the output ends too, and where prompts branch.",
            "",
            *_labelled([("rates", _rates(e.costs))]),
        ]
    )


# ---- what is held ----------------------------------------------------------------------------------------------


def _held_lines(e: Explained) -> Iterator[tuple[str, str]]:
    coverage, size = e.coverage, e.profile.block_tokens
    held = f"{e.blocks_held:,} of {whole_blocks(e.profile, e.prompt_tokens):,} blocks"
    if coverage.blocks != e.blocks_held:
        held += f", {coverage.blocks:,} of them exact"
    yield "held", f"{held}: {coverage.blocks * size:,} tokens"
    if e.blocks_in_flight:
        yield (
            "in flight",
            f"{e.blocks_in_flight:,} blocks after those, that others have been computing for {_seconds(e.in_flight_seconds)}",
        )
    yield "pool", _edges(coverage.pool_states)
    yield "SSD", _edges(coverage.checkpoints)
    rows = [
        f"{name} at {edges[-1]:,}"
        for name, edges in (
            ("with the overlap", coverage.rows_overlap),
            ("without the overlap", coverage.rows),
        )
        if edges
    ]
    if rows:
        yield "rows", f"a resume from window rows {', '.join(rows)}"
    if coverage.branch_at:
        yield "branch", f"at {coverage.branch_at:,} the prompt leaves what is held; another one goes on there"


def _edges(edges: tuple[int, ...]) -> str:
    if not edges:
        return "no state"
    shown = ", ".join(f"{edge:,}" for edge in edges[-EDGES_SHOWN:])
    if len(edges) > EDGES_SHOWN:
        return f"{len(edges)} states, the last at {shown}"
    return f"states at {shown}" if len(edges) > 1 else f"a state at {shown}"


# ---- the plan --------------------------------------------------------------------------------------------------


def _plan_lines(e: Explained) -> Iterator[tuple[str, str]]:
    words = in_words(e.profile, e.chosen, prompt_tokens=e.prompt_tokens)
    yield "plan", f"{e.chosen.state_source}, {e.exactness}: {words}"
    if e.runner_up is not None:
        yield "why", _why(e.chosen, e.runner_up)
    if e.chosen.state_source is not StateSource.NONE:
        share = 100 * e.chosen.seconds / e.cold.seconds
        yield (
            "cold",
            f"Computing everything takes {_seconds(e.cold.seconds)}; the plan takes {_seconds(e.chosen.seconds)}, "
            f"{share:.1f} % of that.",
        )
    yield "saves", _saves(e.save_states)


def _why(chosen: Alternative, other: Alternative) -> str:
    name = (
        "computing everything"
        if other.state_source is StateSource.NONE
        else f"{other.state_source} from {other.compute_from:,}"
    )
    more = difference(chosen, other)
    if more.seconds == 0:
        return (
            f"The runner-up, {name}, costs the same; what reads less from SSD and restores more goes first."
        )
    parts = [
        f"{_seconds(abs(seconds))} {'more' if seconds > 0 else 'less'} for {what}"
        for what, seconds in more.parts
        if abs(seconds) > 1e-12 * other.seconds
    ]
    return f"The runner-up, {name}, takes {_seconds(more.seconds)} longer: {', '.join(parts)}."


def _saves(saves: SaveStates) -> str:
    tiers = [
        f"{where} at {', '.join(f'{edge:,}' for edge in edges[-EDGES_SHOWN:])}"
        + (f" and {len(edges) - EDGES_SHOWN} before" if len(edges) > EDGES_SHOWN else "")
        for where, edges in (("in the pool", saves.pool), ("on SSD", saves.ssd))
        if edges
    ]
    inside = f"States {'; '.join(tiers)}." if tiers else "No state inside the prompt."
    last = [
        where
        for where, wanted in (("in the pool", saves.output_edge_pool), ("on SSD", saves.output_edge_ssd))
        if wanted
    ]
    output = f" The output's last edge {' and '.join(last)}." if last else ""
    if saves.every_tokens:
        output += f" A state on SSD every {saves.every_tokens:,} tokens of the output."
    if saves.rows:
        output += f" Window rows of every token computed{', with the overlap' if saves.rows_overlap else ''}."
    return inside + output


def _ways_table(e: Explained) -> str:
    layers = e.profile.layer_count
    rows = []
    for way in e.ways:
        mark = "chosen" if way == e.chosen else "runner-up" if way == e.runner_up else ""
        rows.append(
            (
                way.state_source,
                f"{way.compute_from:,}",
                f"{way.replay_from:,}",
                f"{way.replay_tokens:,}",
                f"{way.bytes_ssd:,}",
                f"{way.bytes_memory:,}",
                f"{way.replay_layer_tokens:,}",
                f"{(e.prompt_tokens - way.compute_from) * layers:,}",
                f"{way.index_entries:,}",
                _milliseconds(way.read_seconds),
                _milliseconds(way.replay_seconds),
                _milliseconds(way.compute_seconds),
                _milliseconds(way.seconds),
                mark,
            )
        )
    head = (
        "way",
        "computes from",
        "replays from",
        "replayed",
        "B from SSD",
        "B from pool",
        "layer-tokens replayed",
        "and computed",
        "index entries",
        "read ms",
        "replay ms",
        "compute ms",
        "in all ms",
        "",
    )
    return table(rows, head=head)


def _way_json(e: Explained, way: Alternative) -> dict[str, Any]:
    return {
        **way._asdict(),
        "replay_tokens": way.replay_tokens,
        "compute_layer_tokens": (e.prompt_tokens - way.compute_from) * e.profile.layer_count,
    }


# ---- other policies --------------------------------------------------------------------------------------------


def _policies_table(e: Explained) -> str:
    marks = ["now" if outlook.policy == e.policy else "" for outlook in e.outlooks]
    kept = [(str(outlook.policy), f"{outlook.bytes_ssd:,}") for outlook in e.outlooks]
    if not e.next_tokens:
        rows = [(*cells, mark) for cells, mark in zip(kept, marks, strict=True)]
        return table(rows, head=("policy", "B of states kept for this prompt", ""))
    turns = []
    for outlook in e.outlooks:
        way = outlook.next_turn
        turns.append(
            (
                way.state_source,
                f"{way.compute_from:,}",
                f"{way.replay_tokens:,}",
                f"{way.bytes_ssd:,}",
                _milliseconds(outlook.restore_seconds),
                _milliseconds(way.seconds),
            )
        )
    rows_with_turns = [(*a, *b, mark) for a, b, mark in zip(kept, turns, marks, strict=True)]
    head = (
        "policy",
        "B of states kept for this prompt",
        f"next turn (+{e.next_tokens:,})",
        "computes from",
        "replays",
        "B from SSD",
        "restore ms",
        "first token ms",
        "",
    )
    return table(rows_with_turns, head=head)


def _outlook_json(e: Explained, outlook: Outlook) -> dict[str, Any]:
    document: dict[str, Any] = {"policy": str(outlook.policy), "bytes_ssd": outlook.bytes_ssd}
    if e.next_tokens:
        document["next_turn"] = {
            "tokens_added": e.next_tokens,
            "restore_seconds": outlook.restore_seconds,
            **outlook.next_turn._asdict(),
        }
    return document


# ---- numbers ---------------------------------------------------------------------------------------------------


def _rates(costs: Costs) -> str:
    return (
        f"{_seconds(costs.seconds_per_layer_token)} per layer-token, {_seconds(costs.seconds_per_index_entry)} per index "
        f"entry, {_rate(costs.seconds_per_ssd_byte)} from SSD, {_rate(costs.seconds_per_memory_byte)} from the pool, "
        f"{_seconds(costs.seconds_per_fetch)} per fetch, tiles of {costs.tile_tokens} tokens"
    )


def _rate(seconds_per_byte: float) -> str:
    return f"{1e-6 / seconds_per_byte:,.0f} MB/s" if seconds_per_byte else "no time"


def _seconds(value: float) -> str:
    if value == 0:
        return "0 s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= scale:
            return f"{value / scale:,.3g} {unit}" if value < 1000 * scale else f"{value / scale:,.0f} {unit}"
    return f"{value * 1e9:.3g} ns"


def _milliseconds(value: float) -> str:
    return f"{value * 1e3:,.3f}"


def _labelled(lines: list[tuple[str, str]]) -> list[str]:
    width = max(len(label) for label, _ in lines)
    return [f"{label.ljust(width)}  {text}" for label, text in lines]
