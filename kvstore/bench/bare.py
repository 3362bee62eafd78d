"""A bare gRPC stream to measure beside: `python -m kvstore.bench.bare BYTES` holds so many random bytes as finished frames
and streams them all to each call. It prints its port, and ends with its standard input."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import grpc
import grpc.aio

from kvstore.service.frames import FRAME_BYTES
from kvstore.service.listening import SENT_BYTES_MAX

METHOD = "/kvstore.bench.Bare/Stream"
HEAD_BYTES = 32
"""What a frame has beside its data, about."""


def frames_of(size: int) -> list[bytes]:
    """`size` bytes of data; each frame is memory of its own, as what comes out of a store is."""
    return [os.urandom(HEAD_BYTES + min(FRAME_BYTES, size - begin)) for begin in range(0, size, FRAME_BYTES)]


class _Bare:
    def __init__(self, frames: list[bytes]) -> None:
        self._frames = frames

    async def stream(self, request: bytes, context: Any) -> None:
        for frame in self._frames:
            await context.write(frame)


async def _serve(size: int) -> None:
    server = grpc.aio.server(options=[("grpc.max_send_message_length", SENT_BYTES_MAX)])
    service, _, name = METHOD[1:].partition("/")
    handler: Any = grpc.unary_stream_rpc_method_handler(_Bare(frames_of(size)).stream)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.stop(None)


def main() -> None:
    """In the loop that the service runs in."""
    serve = _serve(int(sys.argv[1]))
    if sys.platform == "linux":
        import uvloop

        uvloop.run(serve)
    else:
        asyncio.run(serve)


if __name__ == "__main__":
    main()
