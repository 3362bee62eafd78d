"""What every kind of attack gives back, and how it says how far it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvstore.errors import KvstoreError

Progress = Callable[[str], None]
"""Told a line now and then; only a terminal shows it. May raise, which ends the attack in order."""

Check = Callable[[], None]
"""Called often, also while a child is waited for, and where nothing is half done. May raise, which ends the attack in
order: children, mounts and scratch files go."""


def undisturbed() -> None:
    """The Check of who is never stopped."""


class MissingTool(KvstoreError):
    """A program or a right that an attack cannot do without."""

    code = "MISSING_TOOL"


class ChaosFailed(KvstoreError):
    """The attack itself could not be carried out; nothing was found about the store."""

    code = "CHAOS_FAILED"


@dataclass(slots=True)
class Outcome:
    """What one attack did and found.

    rounds: blows, counted in `unit`. acknowledged: promises that were made to the load. checked: answers of the store
    that were held against the ledger. violations: one line each, with what was expected and what was found.
    figures: other counts and measurements, by name. legend: what the names mean that do not say it themselves.
    """

    attack: str
    seed: int
    unit: str
    rounds: int = 0
    acknowledged: int = 0
    checked: int = 0
    seconds: float = 0.0
    violations: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    legend: Mapping[str, str] = field(default_factory=dict)

    def blame(self, where: str, found: list[str]) -> None:
        """Add violations, each with the place it was found at and the seed that repeats it."""
        self.violations.extend(f"seed {self.seed}, {where}: {line}" for line in found)

    def count(self, name: str, by: int = 1) -> None:
        self.figures[name] = self.figures.get(name, 0) + by

    @property
    def summary(self) -> str:
        return (
            f"{self.attack}: {self.rounds:,} {self.unit}, {self.acknowledged:,} acknowledged, {self.checked:,} checked, "
            f"{len(self.violations):,} violations (seed {self.seed}, {self.seconds:,.1f} s)"
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "attack": self.attack,
            "seed": self.seed,
            "unit": self.unit,
            "rounds": self.rounds,
            "acknowledged": self.acknowledged,
            "checked": self.checked,
            "seconds": round(self.seconds, 3),
            "violations": self.violations,
            "figures": self.figures,
            "legend": dict(self.legend),
            "summary": self.summary,
        }
