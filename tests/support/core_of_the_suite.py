"""The core of the clients' suite as a program of its own: run with the repository's root and what it is told as JSON, in an
environment that has grpcio and protobuf only."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

root, told = sys.argv[1], json.loads(sys.argv[2])
sys.path[:0] = [root, f"{root}/clients"]

import google.protobuf  # noqa: E402
import grpc  # noqa: E402

from kvstore.errors import InvalidArgument, UnknownLease, UnknownNamespace  # noqa: E402
from kvstore.prefix.identity import NamespaceIdentity  # noqa: E402
from kvstore.prefix.keys import block_keys  # noqa: E402
from kvstore.profile.registry import get_profile  # noqa: E402
from kvstore.types import ItemKind  # noqa: E402
from kvstore_client import CacheClient, Costs, ReserveItem  # noqa: E402
from kvstore_client.aio import AsyncCacheClient  # noqa: E402

WAYS: dict[str, tuple[str, dict[str, str]]] = {
    "memory": ("map", {"address": told["local"]}),
    "unix": ("fetch", {"address": told["local"]}),
    "tcp": ("fetch", {"address": told["remote"], "token": told["token"], "ca": told["ca"]}),
}
EAGER = Costs(seconds_per_layer_token=1.0)
PROFILE = get_profile("tiny")


def refused(kind: type[Exception], call: Any) -> None:
    try:
        call()
    except kind:
        return
    raise AssertionError(f"{kind.__name__} was not raised")


class Blocking:
    """An asynchronous client's methods, each run to its end."""

    def __init__(self, inner: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.inner, self.loop = inner, loop

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if not callable(found):
            return found

        def call(*args: Any, **named: Any) -> Any:
            answer = found(*args, **named)
            if hasattr(answer, "__aiter__"):
                return self.loop.run_until_complete(_all(answer))
            return self.loop.run_until_complete(answer) if asyncio.iscoroutine(answer) else answer

        return call


async def _all(items: Any) -> list[Any]:
    return [item async for item in items]


def core(client: Any, salt: str, reads: str, wrap: Any) -> None:
    identity = NamespaceIdentity(PROFILE, weights_revision="w", numerics="n", tenant_salt=salt)
    opened = client.open_namespace(identity, name=salt)
    tokens = list(range(3 * opened.block_tokens))
    keys = block_keys(opened.digest, tokens, block_tokens=opened.block_tokens)
    items = [
        ReserveItem(
            kind=ItemKind.BLOCK,
            key=key,
            parent=keys[i - 1] if i else opened.digest,
            position=(i + 1) * opened.block_tokens,
            length=opened.block_bytes,
        )
        for i, key in enumerate(keys)
    ]
    items.append(
        ReserveItem(
            kind=ItemKind.STATE,
            key=keys[-1],
            position=len(tokens),
            length=opened.state_bytes,
            to_ssd=True,
        )
    )
    payloads = {i: bytes([i + 1]) * item.length for i, item in enumerate(items)}

    def look() -> Any:
        return client.lookup(opened.digest, keys, prompt_tokens=len(tokens) + 1, costs=EAGER, announce=True)

    flight = wrap(look().flight)
    reservation = wrap(client.reserve(opened.digest, items))
    reservation.write(payloads)
    assert reservation.commit().items == len(items)
    assert flight.end() is True
    found = look()
    assert found.blocks_held == 3, found
    got = list(getattr(client, reads)(found.lease, first_block=0, block_count=3, state=True))
    assert [bytes(item.payload) for item in got] == list(payloads.values())
    sliced = list(client.fetch_slices(found.lease, first_block=0, block_count=3, state=True, slices=2))
    assert len(sliced) == 1 + 3 * 2
    wrap(found.lease).release()
    refused(
        UnknownLease,
        lambda: list(client.fetch(found.lease, first_block=0, block_count=1, state=False)),
    )
    refused(UnknownNamespace, lambda: client.lookup(b"x" * 32, [], prompt_tokens=1))
    refused(InvalidArgument, lambda: client.lookup(opened.digest, [b"short"], prompt_tokens=1))
    ticket = client.put_handoff(opened.digest, position=opened.block_tokens, payload=payloads[3])
    take = client.take_handoff(opened.digest, ticket)
    assert take.payload == payloads[3]
    assert wrap(take).confirm() is True


def main() -> None:
    done = []
    for way, (reads, address) in WAYS.items():
        with CacheClient(owner="old", **address) as client:
            core(client, f"{told['salt']}-sync-{way}", reads, lambda held: held)
            done.append(f"sync {way}")
    loop = asyncio.new_event_loop()
    for way, (reads, address) in WAYS.items():
        client = Blocking(AsyncCacheClient(owner="old", **address), loop)
        core(client, f"{told['salt']}-async-{way}", reads, lambda held: Blocking(held, loop))
        client.close()
        done.append(f"async {way}")
    loop.close()
    foreign = {
        "torch",
        "numpy",
        "lmdb",
        "msgpack",
        "uvloop",
        "xxhash",
        "isal",
        "kvstore.service",
        "kvstore.config",
    }
    print(
        json.dumps(
            {
                "done": done,
                "protobuf": google.protobuf.__version__,
                "grpcio": grpc.__version__,
                "python": sys.version.split()[0],
                "foreign": sorted(foreign & set(sys.modules)),
            }
        )
    )


if __name__ == "__main__":
    main()
