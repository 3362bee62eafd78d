"""A process that forks while its client is at work: `python -m tests.support.forking KIND {...}`, with what a client is made with.
Its child lets go of everything that it has been given a copy of. The status is the child's, or not 0."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import select
import signal
import sys
from typing import Any

from kvstore_client import CacheClient
from kvstore_client.aio import AsyncCacheClient
from tests.support.calls import look
from tests.support.chains import Chain, identity_of

BLOCKS = 2
CHILD_SECONDS = 15.0


def status_of_child(held: dict[str, Any]) -> int:
    """-9 where it does not end."""
    child = os.fork()
    if child == 0:
        held.clear()
        gc.collect()
        os._exit(0)
    ended = os.pidfd_open(child)
    if not select.select([ended], [], [], CHILD_SECONDS)[0]:
        os.kill(child, signal.SIGKILL)
    os.close(ended)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def sync(reached: dict[str, Any]) -> int:
    held: dict[str, Any] = {"client": CacheClient(**reached)}
    chain = Chain.of(held["client"].open_namespace(identity_of(), name="forks"), BLOCKS, seed=1)
    chain.store(held["client"])
    held["found"] = look(held["client"], chain)
    held["items"] = held["client"].fetch(held["found"].lease, first_block=0, block_count=BLOCKS, state=False)
    next(held["items"])
    status = status_of_child(held)
    assert len(list(held["items"])) == BLOCKS - 1
    held["client"].close()
    return status


def asynchronous(reached: dict[str, Any]) -> int:
    held: dict[str, Any] = {}

    async def begin() -> None:
        held["client"] = client = AsyncCacheClient(**reached)
        chain = Chain.of(await client.open_namespace(identity_of(), name="forks"), BLOCKS, seed=1)
        held["found"] = await look(client, chain)  # type: ignore[arg-type, misc]
        held["items"] = client.fetch(held["found"].lease, first_block=0, block_count=BLOCKS, state=False)
        await anext(held["items"])

    async def finish() -> None:
        assert len([item async for item in held["items"]]) == BLOCKS - 1
        await held["client"].close()

    with CacheClient(**reached) as client:
        Chain.of(client.open_namespace(identity_of(), name="forks"), BLOCKS, seed=1).store(client)
    with asyncio.Runner() as runner:
        runner.run(begin())
        status = status_of_child(held)
        runner.run(finish())
    # Where nothing is left to ask, too.
    return status or status_of_child(held)


if __name__ == "__main__":
    sys.exit({"sync": sync, "async": asynchronous}[sys.argv[1]](json.loads(sys.argv[2])) & 0xFF)
