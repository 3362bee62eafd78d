"""What a store owes after a crash, as a pure function of the journal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum

from kvstore.chaos.journal import Event, Word, policy_text
from kvstore.chaos.records import NAMESPACES, is_namespace, kind_of, namespace_of
from kvstore.store.base import RecordKind

_SHOWN_MAX = 8


class Sight(StrEnum):
    """How a record that recovery told about was found: with its bytes, as a miss, or with others."""

    RIGHT = "right"
    MISS = "miss"
    WRONG = "wrong"


class Ledger:
    """Acknowledged, attempted, discarded and cleared numbers. Events are applied in the journal's order."""

    def __init__(self) -> None:
        self.acknowledged = 0
        """Records ever acknowledged."""
        self.next_number = 0
        """Numbers below were attempted."""
        self.owed: set[int] = set()
        """Acknowledged, or found by an opening, and not given up since."""
        self.wrong: list[str] = []
        """What the load itself complained about."""
        self._gone: dict[tuple[int, bool], int] = {}
        """(namespace, states only) to the number below which an acknowledged clear took everything."""
        self._policies: dict[int, set[int]] = {}
        """The last acknowledged policy of a namespace, with those attempted since."""
        self._policy_owed: set[int] = set()

    def apply(self, events: Iterable[Event]) -> None:
        for event in events:
            self._apply(event)

    def _apply(self, event: Event) -> None:
        numbers = event.numbers
        match event.word:
            case Word.TRY:
                self.next_number = max(self.next_number, numbers[1])
            case Word.DONE:
                self.owed.update(range(numbers[0], numbers[1]))
                self.acknowledged += numbers[1] - numbers[0]
            case Word.DROP:
                self.owed.difference_update(numbers)
            case Word.CLEAR:
                self.owed = {n for n in self.owed if not _covers(numbers, n)}
            case Word.CLEARED:
                scope = (numbers[0], bool(numbers[2]))
                self._gone[scope] = max(self._gone.get(scope, 0), numbers[1])
            case Word.POLICY:
                self._policies.setdefault(numbers[0], set()).add(numbers[1])
            case Word.POLICY_DONE:
                self._policies[numbers[0]] = {numbers[1]}
                self._policy_owed.add(numbers[0])
            case Word.FOUND:
                self.owed.update(n for n in numbers if not self.is_gone(n))
            case Word.WRONG:
                self.wrong.append(event.text)

    def settle(self, seen: Mapping[int, Sight]) -> None:
        """An opening found exactly this: what it found it owes from now on, and what it lost is lost."""
        self.owed = {n for n, sight in seen.items() if sight is Sight.RIGHT}
        self.wrong = []

    def is_gone(self, number: int) -> bool:
        """Whether an acknowledged clear covers the number."""
        return any(
            _covers((namespace, below, int(states)), number)
            for (namespace, states), below in self._gone.items()
        )

    def violations(self, seen: Mapping[int, Sight], policies: Mapping[int, str]) -> list[str]:
        """What may not be, one line per kind: `seen` is everything that an opening told about, `policies` by
        namespace."""
        lost = sorted(n for n in self.owed if n not in seen)
        missed = sorted(n for n in self.owed if seen.get(n) is Sight.MISS)
        bent = sorted(n for n, sight in seen.items() if sight is Sight.WRONG)
        invented = sorted(n for n in seen if n >= self.next_number)
        returned = sorted(n for n in seen if self.is_gone(n))
        found = [
            *_line("acknowledged and not found again", lost),
            *_line("acknowledged and not readable", missed),
            *_line("served with wrong bytes or a wrong description", bent),
            *_line("found, though nobody had written it", invented),
            *_line("found again after an acknowledged clear", returned),
            *self.wrong,
        ]
        for namespace in sorted(self._policy_owed):
            allowed = {policy_text(n) for n in self._policies[namespace]}
            if policies.get(namespace) not in allowed:
                found.append(
                    f"the policy of namespace {namespace} is {policies.get(namespace)}, acknowledged or attempted: "
                    + ", ".join(sorted(allowed))
                )
        return found


def _covers(clear: tuple[int, ...], number: int) -> bool:
    """Whether a clear of (namespace, number below which, states only) takes the record."""
    namespace, below, states = clear
    if is_namespace(number) or number >= below or namespace_of(number) != namespace % NAMESPACES:
        return False
    return not states or kind_of(number) is not RecordKind.BLOCK


def _line(what: str, numbers: list[int]) -> list[str]:
    if not numbers:
        return []
    shown = ", ".join(map(str, numbers[:_SHOWN_MAX])) + (", ..." if len(numbers) > _SHOWN_MAX else "")
    return [f"{what}: {len(numbers)} ({shown})"]
