"""The fields of one request in a log, checked one by one: BadLine says which is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.simulate.log import BadLine, LogRequest

IDS_MAX = 1 << 24
"""Of one request; what a run-length pair may ask for, too."""

Fields = dict[str, Any]


def located(error: BadLine, origin: str) -> BadLine:
    return BadLine(
        error.kind,
        f"{origin}: {str(error).split('; ')[0]}",
        field=error.field,
        value=error.value,
        allowed=error.allowed,
    )


def request_of(
    fields: Fields, origin: str, *, scale: float, ids: NDArray[np.int64], names: Sequence[str] = ()
) -> LogRequest:
    time, inputs, outputs = names or ("timestamp", "input_length", "output_length")
    return LogRequest(
        _number(fields, time) * scale,
        _whole(fields, inputs),
        _whole(fields, outputs) if outputs in fields else 0,
        ids,
        origin,
    )


def field_of(fields: Fields, name: str) -> Any:
    if name not in fields:
        raise BadLine(
            "broken lines", "a field is missing", field=name, value="", allowed="a field of this name"
        )
    return fields[name]


def _number(fields: Fields, name: str) -> float:
    value = field_of(fields, name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadLine("broken lines", "not a time", field=name, value=ascii(value), allowed="a number")
    try:
        return float(value)
    except OverflowError:
        raise BadLine(
            "broken lines", "not a time", field=name, value=value, allowed="a finite number"
        ) from None


def _whole(fields: Fields, name: str) -> int:
    value = field_of(fields, name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadLine("broken lines", "not a count", field=name, value=ascii(value), allowed="a whole number")
    return value


def id_list(fields: Fields, name: str) -> NDArray[np.int64]:
    value = field_of(fields, name)
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise BadLine(
            "broken lines", "not block ids", field=name, value=ascii(value), allowed="a list of whole numbers"
        )
    try:
        return np.array(value, np.int64)
    except OverflowError:
        raise BadLine(
            "broken lines",
            "not block ids",
            field=name,
            value=max(value, key=abs),
            allowed="numbers of 64 bits",
        ) from None


def expanded(value: object) -> NDArray[np.int64]:
    """[[first, count], ...] to first, first + 1, ..."""
    try:
        pairs = np.array(value, np.int64)
        is_good = isinstance(value, list) and np.array_equal(pairs, np.array(value))
        is_good = is_good and pairs.ndim == 2 and pairs.shape[1] == 2
    except (OverflowError, TypeError, ValueError):
        is_good = False
    if not is_good or (pairs[:, 1] < 1).any() or pairs[:, 1].sum() > IDS_MAX or (pairs[:, 1] > IDS_MAX).any():
        raise BadLine(
            "broken lines",
            "not runs of block ids",
            field="hash_runs",
            value=ascii(value),
            allowed=f"[[first, count], ...], counts of 1 or more, {IDS_MAX} ids in all",
        )
    counts = pairs[:, 1]
    starts = pairs[:, 0] - np.concatenate(([0], np.cumsum(counts)[:-1])) if len(pairs) else counts
    ids: NDArray[np.int64] = np.repeat(starts, counts) + np.arange(counts.sum())
    return ids
