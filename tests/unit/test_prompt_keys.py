"""Keys of a prompt that grows, and keys in one piece."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from kvstore.errors import InvalidArgument
from kvstore.prefix import JoinedKeys, KeyChain, block_keys
from kvstore.prefix import keys as hashing
from kvstore_client import OpenedNamespace, PromptKeys
from kvstore_client.messages import joined_keys

ROOT = bytes(range(32))
B = 16
NAMESPACE = OpenedNamespace(
    digest=ROOT,
    name="n",
    profile_name="tiny",
    policy="zero",
    block_tokens=B,
    block_bytes=1,
    state_bytes=1,
)
MANY = block_keys(ROOT, range(10 * B), block_tokens=B)


class _Counting:
    """SHA-256 that counts what it is given."""

    def __init__(self) -> None:
        self.bytes = 0

    def sha256(self, data: bytes) -> Any:
        counting, made = self, hashlib.sha256(data)
        counting.bytes += len(data)

        class Hasher:
            def update(self, more: bytes) -> None:
                counting.bytes += len(more)
                made.update(more)

            def digest(self) -> bytes:
                return made.digest()

        return Hasher()


def test_a_turn_hashes_its_new_tokens_only(monkeypatch: pytest.MonkeyPatch) -> None:
    counting = _Counting()
    monkeypatch.setattr(hashing, "hashlib", counting)
    prompt = PromptKeys(NAMESPACE)
    turns = []
    for turn in range(20):
        before = counting.bytes
        prompt.extend(range(turn * 3 * B, (turn + 1) * 3 * B))
        assert joined_keys(prompt.keys) is prompt.keys.joined, "a lookup takes the keys as they are"
        turns.append(counting.bytes - before)
    assert len(set(turns)) == 1, f"every turn has as many new tokens: {turns}"
    # Of each block: domain and parent, four bytes a token, and the count of its extras.
    assert turns[0] == 3 * (len(hashing.BLOCK_DOMAIN) + 32 + 4 * B + 4)
    before = counting.bytes
    prompt.extend([1])
    assert counting.bytes == before, "a block that is not whole is not hashed"


def test_a_prompt_has_the_keys_of_its_tokens_however_they_came() -> None:
    tokens = range(10 * B + 5)
    prompt = PromptKeys(NAMESPACE)
    made: list[bytes] = []
    for first in range(0, len(tokens), 7):
        made += prompt.extend(tokens[first : first + 7])
    assert made == list(prompt.keys) == MANY
    assert prompt.token_count == len(tokens)
    assert [prompt.parent(index) for index in range(10)] == [ROOT, *MANY[:9]]


def test_keys_are_one_object_until_a_block_is_completed() -> None:
    prompt = PromptKeys(NAMESPACE)
    prompt.extend(range(B))
    first = prompt.keys
    prompt.extend(range(B - 1))
    assert prompt.keys is first
    prompt.extend([0])
    assert prompt.keys is not first
    assert (len(first), len(prompt.keys)) == (1, 2), "what was taken before stays as it was"


def test_extras_and_refusals_are_those_of_the_chain() -> None:
    prompt, chain = PromptKeys(NAMESPACE), KeyChain(ROOT, block_tokens=B)
    prompt.extend(range(2 * B), extras={B: b"image"})
    assert list(prompt.keys) == chain.extend(range(2 * B), extras={B: b"image"})
    with pytest.raises(InvalidArgument, match="not a token id"):
        prompt.extend([-1])
    assert prompt.token_count == 2 * B


def test_joined_keys_are_a_sequence_of_keys() -> None:
    joined = JoinedKeys(b"".join(MANY))
    assert len(joined) == 10
    assert list(joined) == MANY
    assert [joined[index] for index in range(-10, 10)] == [*MANY, *MANY]
    for cut in (
        slice(0, 10),
        slice(3, 7),
        slice(7, 3),
        slice(-2, None),
        slice(None, None, -1),
        slice(1, 99, 2),
    ):
        assert list(joined[cut]) == MANY[cut]
    assert MANY[4] in joined
    for index in (10, -11):
        with pytest.raises(IndexError):
            joined[index]
    with pytest.raises(InvalidArgument, match="keys"):
        JoinedKeys(bytes(33))
