"""A request log in columns: which blocks each request asks for, when, and what it is long."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import InvalidArgument, LimitExceeded
from kvstore.profile.base import MAX_BLOCK_TOKENS

ID_COLUMN_MAX = 1 << 24
"""Ids from here on take a dict's place each, not four bytes for each number up to them."""

ROOT = -1
"""The parent of a first block."""

BLOCKS_MAX = 2**31 - 1
"""Distinct blocks of one log: they are numbered in 32 bits."""

TOKENS_MAX = 2**32 - 1
"""Of one request, input and output each."""

Numbers = NDArray[np.int32]


class OnBadLine(StrEnum):
    STOP = "stop"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class LogRequest:
    """One request of a log. `seconds`: when it came, from any start; lengths in tokens; `ids`: of its input's blocks in
    order, the last of which may be partly filled. Equal ids mean an equal prefix up to that block's end, unless the log
    is read with `rekey`. `origin` says where it comes from, in errors."""

    seconds: float
    input_tokens: int
    output_tokens: int
    ids: Sequence[int] | NDArray[np.int64]
    origin: str = ""


class BadLine(InvalidArgument):
    """One request of a log cannot be used. `kind` is what it is counted as."""

    def __init__(self, kind: str, message: str, *, field: str, value: object, allowed: str) -> None:
        super().__init__(message, field=field, value=value, allowed=allowed)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class RequestLog:
    """`block_tokens`: of one block, which is `group` ids of `id_tokens` tokens. `parents`: for each distinct block, numbered
    as they first came, the one before it. The other columns have one row per request; the blocks of request r are the
    runs `first_run[r] <= run < first_run[r + 1]`, each `run_count` numbers from `run_start` on."""

    id_tokens: int
    group: int
    rekeyed: bool
    seconds: NDArray[np.float64]
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    first_run: NDArray[np.int64]
    run_start: Numbers
    run_count: Numbers
    parents: Numbers
    accesses: int
    skipped: Counter[str] = field(default_factory=Counter)

    @property
    def block_tokens(self) -> int:
        return self.id_tokens * self.group

    @property
    def footprint(self) -> int:
        """Distinct blocks."""
        return len(self.parents)

    @property
    def input_tokens_total(self) -> int:
        return int(self.input_tokens.sum())

    @property
    def span_seconds(self) -> float:
        return float(self.seconds[-1] - self.seconds[0]) if len(self) else 0.0

    def __len__(self) -> int:
        return len(self.seconds)

    def runs(self, request: int) -> Iterator[tuple[int, int]]:
        """(First number, how many) of each run of blocks of a request."""
        begin, end = self.first_run[request], self.first_run[request + 1]
        return zip(self.run_start[begin:end].tolist(), self.run_count[begin:end].tolist(), strict=True)

    def blocks(self, request: int) -> Numbers:
        """Numbers of a request's blocks."""
        runs = [np.arange(start, start + count, dtype=np.int32) for start, count in self.runs(request)]
        return np.concatenate(runs) if runs else np.empty(0, np.int32)


class _Naming(Protocol):
    """Numbers of a request's blocks: those that are known, then -1 for each that is new."""

    def numbers(self, ids: NDArray[np.int64]) -> tuple[Numbers, int]:
        """(Numbers of the known blocks at the start, how many blocks there are.) Changes nothing."""

    def add(self, ids: NDArray[np.int64], known: int, first: int) -> None:
        """The blocks after the first `known` get numbers from `first` on."""


class _ByPrefix:
    """Ids that stand for a whole prefix: a group is named by its last one."""

    def __init__(self, group: int, parents: _Parents) -> None:
        self._group = group
        self._parents = parents
        self._known = _IdTable()

    def _names(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        names = ids[self._group - 1 :: self._group]
        return np.append(names, ids[-1]) if len(ids) % self._group else names

    def numbers(self, ids: NDArray[np.int64]) -> tuple[Numbers, int]:
        names = self._names(ids)
        found = self._known.find(names)
        new = np.flatnonzero(found < 0)
        known = int(new[0]) if len(new) else len(names)
        whole = found[:known]
        above = np.concatenate(([ROOT], whole[:-1])) if known else whole
        wrong = np.flatnonzero(self._parents.of(whole) != above)
        if len(wrong) or known + len(new) != len(names):
            at = int(wrong[0]) if len(wrong) else int(np.flatnonzero(found[known:] >= 0)[0]) + known
            raise _contradiction(int(names[at]), at)
        fresh = names[known:].tolist()
        if len(set(fresh)) != len(fresh):
            at = next(at for at, name in enumerate(fresh) if name in fresh[:at])
            raise _contradiction(fresh[at], known + at)
        return whole, len(names)

    def add(self, ids: NDArray[np.int64], known: int, first: int) -> None:
        self._known.add(self._names(ids)[known:], first)


class _IdTable:
    """Numbers of blocks by their ids. Logs count their ids, so those are places of a column; what is no such place, or one too
    far out to pay for, is in a dict."""

    def __init__(self) -> None:
        self._column = np.full(1024, -1, np.int32)
        self._others: dict[int, int] = {}

    def find(self, names: NDArray[np.int64]) -> Numbers:
        """The number of each, -1 for those that are not known."""
        column = self._column
        placed = (names >= 0) & (names < len(column))
        if placed.all():
            return column[names]
        found = np.full(len(names), -1, np.int32)
        found[placed] = column[names[placed]]
        if self._others:
            rest = np.flatnonzero(~placed)
            get = self._others.get
            found[rest] = [get(name, -1) for name in names[rest].tolist()]
        return found

    def add(self, names: NDArray[np.int64], first: int) -> None:
        """These, which are not known, get numbers from `first` on."""
        numbers = np.arange(first, first + len(names), dtype=np.int32)
        small = (names >= 0) & (names < ID_COLUMN_MAX)
        if small.any():
            self._reach(int(names[small].max()))
            self._column[names[small]] = numbers[small]
        if not small.all():
            self._others.update(zip(names[~small].tolist(), numbers[~small].tolist(), strict=True))

    def _reach(self, most: int) -> None:
        if most >= len(self._column):
            grown = np.full(min(max(2 * len(self._column), most + 1), ID_COLUMN_MAX), -1, np.int32)
            grown[: len(self._column)] = self._column
            self._column = grown


class _ByParent:
    """Ids that stand for their own tokens alone: a block is named by its parent and its ids."""

    def __init__(self, group: int) -> None:
        self._group = group
        self._known: dict[tuple[int, bytes], int] = {}

    def _names(self, ids: NDArray[np.int64]) -> list[bytes]:
        step = self._group
        return [ids[at : at + step].tobytes() for at in range(0, len(ids), step)]

    def numbers(self, ids: NDArray[np.int64]) -> tuple[Numbers, int]:
        names = self._names(ids)
        found, above = array("i"), ROOT
        for name in names:
            number = self._known.get((above, name))
            if number is None:
                break
            found.append(number)
            above = number
        return np.array(found, np.int32), len(names)

    def add(self, ids: NDArray[np.int64], known: int, first: int) -> None:
        above = ROOT
        for at, name in enumerate(self._names(ids)):
            if at < known:
                above = self._known[above, name]
            else:
                self._known[above, name] = above = first + at - known


class _Parents:
    """A column that grows by doubling."""

    def __init__(self) -> None:
        self._column = np.empty(1024, np.int32)
        self.count = 0

    def of(self, numbers: Numbers) -> Numbers:
        return self._column[numbers]

    def append_chain(self, above: int, count: int) -> None:
        """`count` blocks, each below the one before, the first below `above`."""
        end = self.count + count
        if end > BLOCKS_MAX:
            raise LimitExceeded(
                "too many distinct blocks", field="blocks", value=end, allowed=f"{BLOCKS_MAX}"
            )
        while end > len(self._column):
            self._column = np.concatenate((self._column, np.empty_like(self._column)))
        self._column[self.count : end] = np.arange(self.count - 1, end - 1, dtype=np.int32)
        self._column[self.count] = above
        self.count = end

    def column(self) -> Numbers:
        return self._column[: self.count].copy()


def read_log(
    requests: Iterable[LogRequest | BadLine],
    *,
    id_tokens: int,
    group: int = 1,
    rekey: bool = False,
    on_bad_line: OnBadLine = OnBadLine.STOP,
) -> RequestLog:
    """The log that an iterator of requests makes, in the order given.

    id_tokens: tokens of one id; group: how many ids make one block, counted from the start (a last group may be short, and
    is a block like any other); rekey: ids stand for their own tokens only, and a block is named by what comes before
    it too. A request that cannot be used raises BadLine, or with SKIP is left out and counted: times that run backwards,
    lengths that are no lengths, ids that are not as many as the input has blocks, ids that contradict their parents.
    """
    _check_sizes(id_tokens, group)
    parents = _Parents()
    naming: _Naming = _ByParent(group) if rekey else _ByPrefix(group, parents)
    seconds, inputs, outputs = array("d"), array("q"), array("q")
    first_run, starts, counts = array("q", (0,)), array("i"), array("i")
    skipped: Counter[str] = Counter()
    accesses, latest = 0, -np.inf
    for request in requests:
        try:
            if isinstance(request, BadLine):
                raise request
            ids = _check(request, id_tokens, latest)
            known, blocks = naming.numbers(ids)
        except BadLine as error:
            if on_bad_line is OnBadLine.STOP:
                raise _located(error, "" if isinstance(request, BadLine) else request.origin) from error
            skipped[error.kind] += 1
            continue
        latest = request.seconds
        first, fresh = parents.count, blocks - len(known)
        if fresh:
            naming.add(ids, len(known), first)
            parents.append_chain(int(known[-1]) if len(known) else ROOT, fresh)
        for start, count in _runs(known, first, fresh):
            starts.append(start)
            counts.append(count)
        first_run.append(len(starts))
        seconds.append(request.seconds)
        inputs.append(request.input_tokens)
        outputs.append(request.output_tokens)
        accesses += blocks
    return RequestLog(
        id_tokens,
        group,
        rekey,
        np.array(seconds, np.float64),
        np.array(inputs, np.int64),
        np.array(outputs, np.int64),
        np.array(first_run, np.int64),
        np.array(starts, np.int32),
        np.array(counts, np.int32),
        parents.column(),
        accesses,
        skipped,
    )


def _runs(known: Numbers, first: int, fresh: int) -> Iterator[tuple[int, int]]:
    if len(known):
        begins = np.append(0, np.flatnonzero(np.diff(known) != 1) + 1)
        lengths = np.diff(np.append(begins, len(known)))
        pairs = list(zip(known[begins].tolist(), lengths.tolist(), strict=True))
        if fresh and sum(pairs[-1]) == first:
            pairs[-1], fresh = (pairs[-1][0], pairs[-1][1] + fresh), 0
        yield from pairs
    if fresh:
        yield first, fresh


def _check(request: LogRequest, id_tokens: int, latest: float) -> NDArray[np.int64]:
    for name, value, low in (
        ("input_tokens", request.input_tokens, 1),
        ("output_tokens", request.output_tokens, 0),
    ):
        if not low <= value <= TOKENS_MAX:
            raise BadLine(
                "lengths", "not a length in tokens", field=name, value=value, allowed=f"{low} to {TOKENS_MAX}"
            )
    if not np.isfinite(request.seconds):
        raise BadLine(
            "times", "not a time", field="seconds", value=request.seconds, allowed="a finite number"
        )
    if request.seconds < latest:
        raise BadLine(
            "times backwards",
            "time runs backwards",
            field="seconds",
            value=f"{request.seconds:g}",
            allowed=f"{latest:g} or later, the time of the request before",
        )
    try:
        ids = np.asarray(request.ids, np.int64)
    except (OverflowError, TypeError, ValueError) as error:
        raise BadLine(
            "ids", "not block ids", field="ids", value=str(error), allowed="whole numbers of 64 bits"
        ) from error
    least, most = request.input_tokens // id_tokens, -(-request.input_tokens // id_tokens)
    if ids.ndim != 1 or not least <= len(ids) <= most:
        raise BadLine(
            "ids",
            f"{request.input_tokens} tokens have another number of blocks of {id_tokens}",
            field="ids",
            value=ids.size,
            allowed=f"{least} or {most}; --block says how many tokens an id stands for",
        )
    return ids


def _contradiction(name: int, at: int) -> BadLine:
    return BadLine(
        "ids contradict their parents",
        f"block {at} was seen before with another one before it",
        field="ids",
        value=name,
        allowed="ids that stand for a whole prefix, each always after the same one",
    )


def _located(error: BadLine, origin: str) -> BadLine:
    if not origin:
        return error
    return BadLine(
        error.kind,
        f"{origin}: {str(error).split('; ')[0]}",
        field=error.field,
        value=error.value,
        allowed=error.allowed,
    )


def _check_sizes(id_tokens: int, group: int) -> None:
    for name, value, most in (
        ("--block", id_tokens, MAX_BLOCK_TOKENS),
        ("--group", group, MAX_BLOCK_TOKENS // max(id_tokens, 1)),
    ):
        if not 1 <= value <= most:
            raise InvalidArgument(
                f"not a size of a block, which has at most {MAX_BLOCK_TOKENS} tokens",
                field=name,
                value=value,
                allowed=f"1 to {most}",
            )
