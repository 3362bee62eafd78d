"""What happens in which turn: pure, so that a reader sees the whole session in one place."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from kvstore.errors import ConfigError
from kvstore.types import StateSource

MIN_TURNS = 9
MAX_TURNS = 64


class Before(StrEnum):
    """What is done to the service before a turn."""

    NOTHING = ""
    KILL = "service killed -9 and started again"
    EMPTY_POOL = "pool emptied"
    DROP_STATES = "all window states dropped"
    FULL_POLICY = "policy set to full"


@dataclass(frozen=True, slots=True)
class Turn:
    number: int
    before: Before = Before.NOTHING
    kill_during_store: bool = False


ROWS_TURN = 9
"""The turn that is to resume from rows."""

PLANNED_SOURCES = (StateSource.POOL, StateSource.CHECKPOINT, StateSource.ROWS, StateSource.REPLAY)


def plan_turns(count: int) -> list[Turn]:
    """Turn 1 is cold. Turn 3 is shot at while it stores; before 5 the service dies idle; before 6 the pool is emptied;
    before 7 every window state goes, so that only a replay is left; from 8 on the window rows of every token are kept, and
    before 9 the pool is emptied again, so that 9 resumes from rows. The rest are ordinary."""
    if not MIN_TURNS <= count <= MAX_TURNS:
        raise ConfigError(
            "bad number of turns", field="--turns", value=count, allowed=f"{MIN_TURNS} to {MAX_TURNS}"
        )
    special = {
        3: Turn(3, kill_during_store=True),
        5: Turn(5, before=Before.KILL),
        6: Turn(6, before=Before.EMPTY_POOL),
        7: Turn(7, before=Before.DROP_STATES),
        8: Turn(8, before=Before.FULL_POLICY),
        ROWS_TURN: Turn(ROWS_TURN, before=Before.EMPTY_POOL),
    }
    return [special.get(number, Turn(number)) for number in range(1, count + 1)]


def aim(turn: Turn, *, missed: bool, lacking: bool = False) -> Turn:
    """The turn as it is played: after a kill that came too late to fall into a store, this one is shot at too; while rows
    are kept and no turn has resumed from them (`lacking`), the pool is emptied before this one."""
    if missed:
        turn = replace(turn, kill_during_store=True)
    if lacking and turn.before is Before.NOTHING:
        turn = replace(turn, before=Before.EMPTY_POOL)
    return turn
