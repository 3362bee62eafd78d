"""The formats of request logs, read to requests in order of time. Each reader says how many tokens one id stands for."""

from __future__ import annotations

import gzip
import heapq
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import IO, cast

import numpy as np

from kvstore.errors import InvalidArgument
from kvstore.simulate.fields import Fields, expanded, field_of, id_list, located, request_of
from kvstore.simulate.log import BadLine, LogRequest, OnBadLine, RequestLog, read_log

LINE_BYTES_MAX = 64 << 20
SESSION_BYTES_MAX = 1 << 30
FIRST_LINES = 16
"""How many lines are looked at to tell the format."""

Parsed = LogRequest | BadLine


@dataclass(frozen=True, slots=True)
class Format:
    """`rekey`: ids hash one block alone, so that a block is named by its parent too. `read` turns one line's fields into a
    request; sessions come as whole files and have None."""

    name: str
    what: str
    id_tokens: int
    rekey: bool
    read: Callable[[Fields, str], LogRequest] | None


@dataclass(frozen=True, slots=True)
class LoadedLog:
    """A log with the format that it was read as."""

    format: Format
    log: RequestLog


def _mooncake(fields: Fields, origin: str) -> LogRequest:
    return request_of(fields, origin, scale=0.001, ids=id_list(fields, "hash_ids"))


def _runs(fields: Fields, origin: str) -> LogRequest:
    return request_of(fields, origin, scale=0.001, ids=expanded(field_of(fields, "hash_runs")))


def _bailian(fields: Fields, origin: str) -> LogRequest:
    return request_of(fields, origin, scale=1.0, ids=id_list(fields, "hash_ids"))


MOONCAKE = Format("mooncake", "JSON lines with hash_ids of 512 tokens, times in ms", 512, False, _mooncake)
RUNS = Format(
    "runs", "JSON lines with hash_runs [[first, count], ...] of 64 tokens, times in ms", 64, False, _runs
)
BAILIAN = Format(
    "bailian",
    "JSON lines with chat_id and hash_ids of 16 tokens each by itself, times in s",
    16,
    True,
    _bailian,
)
WEKA = Format(
    "weka",
    "one JSON file a session: requests with t, in, out, hash_ids of block_size tokens",
    64,
    False,
    None,
)

FORMATS: dict[str, Format] = {each.name: each for each in (MOONCAKE, RUNS, BAILIAN, WEKA)}


def load_log(
    paths: Sequence[Path],
    *,
    format_name: str | None = None,
    id_tokens: int | None = None,
    group: int = 1,
    on_bad_line: OnBadLine = OnBadLine.STOP,
) -> LoadedLog:
    """One log, which may lie in several files: lines in the order given, sessions merged by time. `format_name` None tells it
    from the first lines. InvalidArgument names the file, and BadLine the line, that cannot be used."""
    chosen = _format(format_name) if format_name is not None else detect(paths)
    if chosen is WEKA:
        requests, size = _sessions(paths)
    else:
        requests, size = _lines(paths, chosen), chosen.id_tokens
    log = read_log(
        requests,
        id_tokens=id_tokens if id_tokens is not None else size,
        group=group,
        rekey=chosen.rekey,
        on_bad_line=on_bad_line,
    )
    if not log.footprint:
        raise InvalidArgument(
            "no request with block ids in it",
            field="LOG",
            value=", ".join(map(str, paths)),
            allowed=f"at least one; format {chosen.name}: {chosen.what}",
        )
    return LoadedLog(chosen, log)


def detect(paths: Sequence[Path]) -> Format:
    """By the names of the fields of the first lines that are JSON objects."""
    with _open(paths[0]) as file:
        for _ in range(FIRST_LINES):
            line = _readline(file, paths[0])
            if not line:
                break
            try:
                fields = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if not isinstance(fields, dict):
                continue
            if "hash_runs" in fields:
                return RUNS
            if isinstance(fields.get("requests"), list):
                return WEKA
            if "hash_ids" in fields:
                return BAILIAN if "chat_id" in fields else MOONCAKE
    try:
        _session(paths[0])
    except InvalidArgument:
        raise InvalidArgument(
            "the format of the log cannot be told from its first lines",
            field="LOG",
            value=paths[0],
            allowed=f"say it with --format: {', '.join(FORMATS)}",
        ) from None
    return WEKA


def _format(name: str) -> Format:
    try:
        return FORMATS[name]
    except KeyError:
        raise InvalidArgument(
            "unknown format of a log", field="--format", value=name, allowed=", ".join(FORMATS)
        ) from None


# ---- lines -----------------------------------------------------------------------------------------------------


def _lines(paths: Iterable[Path], chosen: Format) -> Iterator[Parsed]:
    read = chosen.read
    assert read is not None, "a format of lines reads lines"
    for path in paths:
        with _open(path) as file:
            number = 0
            while line := _readline(file, path):
                number += 1
                if line.isspace():
                    continue
                origin = f"{path}, line {number}"
                try:
                    yield read(_object(line), origin)
                except BadLine as error:
                    yield located(error, origin)


@contextmanager
def _open(path: Path) -> Iterator[IO[bytes]]:
    """Plain or gzip, by its first bytes."""
    try:
        opened = path.open("rb")
    except OSError as error:
        raise InvalidArgument(
            f"cannot read the log: {error.strerror}",
            field="LOG",
            value=path,
            allowed="a file that can be read",
        ) from error
    with opened as file:
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        if not packed:
            yield file
            return
        with gzip.open(file) as unpacked:
            yield cast(IO[bytes], unpacked)


def _readline(file: IO[bytes], path: Path) -> bytes:
    try:
        line = file.readline(LINE_BYTES_MAX + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InvalidArgument(
            f"the compressed log is damaged: {error}", field="LOG", value=path, allowed="a whole gzip file"
        ) from error
    if len(line) > LINE_BYTES_MAX:
        raise InvalidArgument(
            "a line is too long", field="LOG", value=path, allowed=f"at most {LINE_BYTES_MAX} bytes a line"
        )
    return line


def _object(line: bytes) -> Fields:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadLine(
            "broken lines", f"not JSON ({error})", field="line", value=_shown(line), allowed="a JSON object"
        ) from None
    if not isinstance(fields, dict):
        raise BadLine(
            "broken lines", "not a JSON object", field="line", value=_shown(line), allowed="a JSON object"
        )
    return fields


def _shown(line: bytes) -> str:
    return ascii(line[:40].decode("utf-8", "replace"))


# ---- sessions --------------------------------------------------------------------------------------------------


def _sessions(paths: Sequence[Path]) -> tuple[Iterator[Parsed], int]:
    """The requests of all sessions by time, each session from its own start, and the tokens of one id. Ids are a session's
    own unless it says that they are global."""
    documents = [(path, _session(path)) for path in paths]
    sizes = {_size(document, path) for path, document in documents}
    if len(sizes) > 1:
        raise InvalidArgument(
            "the sessions have blocks of several sizes",
            field="block_size",
            value=sorted(sizes),
            allowed="one size",
        )
    streams = []
    scopes = count(1)
    for path, document in documents:
        own = None if document.get("hash_id_scope") == "global" else scopes
        streams.append(sorted(_session_requests(document["requests"], str(path), own), key=_when))
    return iter(heapq.merge(*streams, key=_when)), sizes.pop()


def _when(request: Parsed) -> float:
    return request.seconds if isinstance(request, LogRequest) else -np.inf


def _session(path: Path) -> Fields:
    with _open(path) as file:
        try:
            text = file.read(SESSION_BYTES_MAX + 1)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise InvalidArgument(
                f"the compressed log is damaged: {error}",
                field="LOG",
                value=path,
                allowed="a whole gzip file",
            ) from error
    try:
        document = json.loads(text) if len(text) <= SESSION_BYTES_MAX else None
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or not isinstance(document.get("requests"), list):
        raise InvalidArgument(
            "not a session",
            field="LOG",
            value=path,
            allowed=f"one JSON object with a list `requests`; {WEKA.what}",
        )
    return document


def _size(document: Fields, path: Path) -> int:
    size = document.get("block_size", WEKA.id_tokens)
    if isinstance(size, bool) or not isinstance(size, int):
        raise InvalidArgument(
            f"{path}: not a block size", field="block_size", value=size, allowed="a whole number"
        )
    return size


def _session_requests(
    entries: Iterable[object], where: str, scopes: Iterator[int] | None
) -> Iterator[Parsed]:
    """Those of a session, and of the subagents in it. Each numbers its blocks from 1 and so gets a range of ids of its own,
    unless ids are global (`scopes` None)."""
    scope = 0 if scopes is None else next(scopes)
    for number, entry in enumerate(entries, start=1):
        origin = f"{where}, request {number}"
        try:
            if not isinstance(entry, dict):
                raise BadLine(
                    "broken lines",
                    "not a request",
                    field="requests",
                    value=ascii(entry),
                    allowed="JSON objects",
                )
            inner = entry.get("requests")
            if isinstance(inner, list):
                yield from _session_requests(inner, origin, scopes)
                continue
            ids = id_list(entry, "hash_ids") + (scope << 40)
            yield request_of(entry, origin, scale=1.0, ids=ids, names=("t", "in", "out"))
        except BadLine as error:
            yield located(error, origin)
