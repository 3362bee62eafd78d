"""The note that goes with a handoff: what a decode worker must know beside the state."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.errors import DamagedBytes
from kvstore_client.values import SaveStates

NOTE_VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """prompt_tokens: the state's position. prompt: digest of its tokens. first_tokens: of each sample, picked from the
    prompt's last logits, not consumed yet. The rest: which states and rows the decode worker is to keep."""

    prompt_tokens: int
    prompt: str
    first_tokens: tuple[int, ...]
    output_edge_pool: bool
    output_edge_ssd: bool
    every_tokens: int
    rows: bool = False
    rows_overlap: bool = False

    def save_states(self) -> SaveStates:
        """What is left to keep: the prompt's own edges are the prefill worker's."""
        return SaveStates(
            pool=(),
            ssd=(),
            output_edge_pool=self.output_edge_pool,
            output_edge_ssd=self.output_edge_ssd,
            every_tokens=self.every_tokens,
            rows=self.rows,
            rows_overlap=self.rows_overlap,
        )


def prompt_digest(tokens: Sequence[int]) -> str:
    return hashlib.sha256(array("I", tokens).tobytes()).hexdigest()


def encode_note(note: Note) -> bytes:
    fields = {
        "version": NOTE_VERSION,
        "prompt_tokens": note.prompt_tokens,
        "prompt": note.prompt,
        "first_tokens": list(note.first_tokens),
        "output_edge_pool": note.output_edge_pool,
        "output_edge_ssd": note.output_edge_ssd,
        "every_tokens": note.every_tokens,
        "rows": note.rows,
        "rows_overlap": note.rows_overlap,
    }
    return json.dumps(fields, sort_keys=True).encode()


def decode_note(note: bytes) -> Note:
    """Inverse of `encode_note`; DamagedBytes for anything that it would not have written."""
    try:
        fields = json.loads(note)
        version = fields.pop("version")
        decoded = Note(**{**fields, "first_tokens": tuple(fields["first_tokens"])})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedBytes("a handoff's note could not be read", field="note", value=str(error)) from error
    if version != NOTE_VERSION or encode_note(decoded) != note or not _plain(decoded):
        raise DamagedBytes("a handoff's note is of another form", field="note", value=note[:60])
    return decoded


def _plain(note: Note) -> bool:
    counts = (note.prompt_tokens, *note.first_tokens, note.every_tokens)
    flags = (note.output_edge_pool, note.output_edge_ssd, note.rows, note.rows_overlap)
    return (
        all(type(c) is int and c >= 0 for c in counts)
        and all(type(f) is bool for f in flags)
        and type(note.prompt) is str
    )
