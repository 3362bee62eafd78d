"""Records on their way in: what a caller may hand to a log, and how the log keeps it. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.errors import InvalidArgument
from kvstore.store.base import Record, RecordKind
from kvstore.store.catalog import Description
from kvstore.store.format import PAYLOAD_BYTES_MAX, POLICY_KIND, PayloadSums, payload_sums
from kvstore.store.writer import Pending
from kvstore.types import KEY_BYTES, BlockKey, Checks, Lineage, NamespaceDigest

POLICY_BYTES_MAX = 4096
_NO_KEY = BlockKey(bytes(KEY_BYTES))
_KINDS = frozenset(RecordKind)
_U64_MAX = 2**64 - 1


def refuse_impossible(records: Sequence[Record], *, payload_bytes_max: int) -> None:
    """Raise InvalidArgument, naming the field, for what no log holds."""
    total = 0
    for record in records:
        if record.kind not in _KINDS:
            raise InvalidArgument(
                "no such kind of record",
                field="kind",
                value=record.kind,
                allowed=", ".join(kind.name for kind in RecordKind),
            )
        for field in ("namespace", "key", "parent"):
            value = getattr(record, field)
            if len(value) != KEY_BYTES:
                raise InvalidArgument(
                    "digests are compared whole",
                    field=field,
                    value=bytes(value),
                    allowed=f"{KEY_BYTES} bytes",
                )
        if not 0 <= record.position <= _U64_MAX:
            raise InvalidArgument(
                "a position is a token count",
                field="position",
                value=record.position,
                allowed=f"0 to {_U64_MAX}",
            )
        total += memoryview(record.payload).nbytes
    limit = min(payload_bytes_max, PAYLOAD_BYTES_MAX)
    if total > limit:
        raise InvalidArgument(
            "one append holds no more payload; append it in parts, or use larger segments",
            field="payload_bytes",
            value=total,
            allowed=f"at most {limit}",
        )


SUMMED_AHEAD = 16
"""Records of a batch that are summed up before it is its turn: the device has work at once then, and the rest is summed up
while it is at work."""


def pending_records(records: Sequence[Record], *, payload_bytes_max: int) -> list[Pending]:
    """The records, to be given their sequences and time when it is their turn. Raises InvalidArgument."""
    refuse_impossible(records, payload_bytes_max=payload_bytes_max)
    return [
        Pending(
            int(record.kind),
            record.namespace,
            record.key,
            record.parent,
            record.position,
            record.lineage,
            record.checks,
            record.payload,
            memoryview(record.payload).nbytes,
            0,
            0,
            record.slices,
            record.slot,
            _sums_ahead(record, number),
        )
        for number, record in enumerate(records)
    ]


def _sums_ahead(record: Record, number: int) -> PayloadSums | None:
    if record.sums is not None or number >= SUMMED_AHEAD:
        return record.sums
    return payload_sums(record.payload, record.slices)


def pending_policy(namespace: NamespaceDigest, policy: str, *, sequence: int, created_ms: int) -> Pending:
    """A policy as a record. Raises InvalidArgument."""
    text = policy.encode()
    if len(namespace) != KEY_BYTES:
        raise InvalidArgument(
            "digests are compared whole", field="namespace", value=namespace, allowed=f"{KEY_BYTES} bytes"
        )
    if len(text) > POLICY_BYTES_MAX:
        raise InvalidArgument(
            "the policy's text is too long",
            field="policy",
            value=policy,
            allowed=f"at most {POLICY_BYTES_MAX} bytes of UTF-8",
        )
    return Pending(
        POLICY_KIND,
        namespace,
        BlockKey(namespace),
        _NO_KEY,
        0,
        Lineage.EXACT,
        Checks(0),
        text,
        len(text),
        sequence,
        created_ms,
    )


def pending_description(each: Description, *, created_ms: int) -> Pending:
    """The same record once more."""
    return Pending(
        int(RecordKind.NAMESPACE),
        each.namespace,
        each.key,
        each.parent,
        each.position,
        each.lineage,
        each.checks,
        each.payload,
        len(each.payload),
        each.sequence,
        created_ms,
    )
