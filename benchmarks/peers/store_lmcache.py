"""LMCache's server, and this process as a client of it by its own client library, which moves the payloads (engine-driven).

`shm`: the client copies them into and out of the server's shared memory (--shm-name). `pickle`: they go through the
server's socket, as they do when no memory is named.

On DISK the server has a second tier of files (fs_native); what it acknowledges is in its memory, and files follow.
"""

from __future__ import annotations

import json
import os
import urllib.request
import uuid
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.peers.base import BLOCK_TOKENS, Peer, PeerFailed, Place, Prompt, Tier
from benchmarks.peers.processes import Server, free_ports, inherited, listens, wait_until

TOKEN_BYTES = 3514
"""The profile's 3,514.25 rounded down: a cache of tensors holds whole bytes a token."""
POLL_SECONDS = 0.0005
"""Between two questions whether a lookup is answered: their own client asks every 10 ms at the least."""
MODEL = "bench"
INSTANCE = 1000
CALL_SECONDS = 60.0
FILES_SECONDS = 180.0
_GIB = 1 << 30


class Served(Peer):
    """The server's life, and what all ways have in common. `mode`: its --supported-transfer-mode."""

    block_bytes = BLOCK_TOKENS * TOKEN_BYTES

    def __init__(self, place: Place, *, mode: str, threads: int) -> None:
        super().__init__(place)
        self.threads = threads
        self._mode = mode
        self._server: Server | None = None
        self._client: Any = None
        self._http = 0
        self._files = 0

    def more_flags(self) -> list[str]:
        return []

    @abstractmethod
    def connect(self) -> None:
        """Tell the server of this client's layout."""

    # ---- the server -----------------------------------------------------------------------------------------

    def start(self) -> None:
        port, self._http, metrics = free_ports(3)
        # It begins to evict at 0.8 of it. On disk both passes must fit.
        passes = 1 if self.place.tier is Tier.MEMORY else 2
        gigabytes = (self.place.set_bytes * passes * 4 // 3 + _GIB // 2) / _GIB
        command = [
            str(self.place.scripts / "lmcache"),
            "server",
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--http-host", "127.0.0.1", "--http-port", str(self._http), "--prometheus-port", str(metrics)),
            *("--l1-size-gb", f"{gigabytes:.3f}", "--eviction-policy", "LRU"),
            *("--chunk-size", str(BLOCK_TOKENS), "--max-workers", "2"),
            *("--supported-transfer-mode", self._mode),
            *self.more_flags(),
        ]
        if self.place.tier is Tier.DISK:
            files = self.place.directory / "lmcache"
            files.mkdir(exist_ok=True)
            command += ["--l2-adapter", json.dumps({"type": "fs_native", "base_path": str(files)})]
        quiet = {
            "LMCACHE_DISABLE_BANNER": "1",
            "LMCACHE_TRACK_USAGE": "false",
            "LMCACHE_LOG_LEVEL": "WARNING",
            "DO_NOT_TRACK": "1",
            "PYTHONHASHSEED": "0",
        }
        os.environ.update(quiet)
        self._server = Server(
            command, log=self.place.directory / "lmcache.log", environment=inherited(**quiet)
        )
        self._server.wait_for(lambda: listens(port) and listens(self._http), what="lmcache server")
        import zmq
        from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

        self._client = RequestClientFactory.create(f"tcp://127.0.0.1:{port}", context=zmq.Context())
        self.connect()

    def stop(self) -> None:
        if self._client is not None:
            self._client.close()
        if self._server is not None:
            self._server.stop()
        self._server = self._client = None

    # ---- requests -------------------------------------------------------------------------------------------

    def look_up(self, key: Any, blocks: int) -> None:
        """Locks what is found, and brings it into the server's memory."""
        self._client.lookup(key.no_worker_id_version(), 1).result(timeout=CALL_SECONDS)
        held: list[int | None] = [None]

        def answered() -> bool:
            held[0] = self._client.query_prefetch_status(key.request_id).result(timeout=CALL_SECONDS)
            return held[0] is not None

        wait_until(answered, what="lmcache's lookup", seconds=CALL_SECONDS, poll=POLL_SECONDS)
        if held[0] != blocks:
            raise PeerFailed(f"lmcache holds {held[0]} of {blocks} blocks")

    def key(self, prompt: Prompt) -> Any:
        from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey

        tokens = tuple(prompt.tokens())
        return IPCCacheServerKey(
            model_name=MODEL,
            world_size=1,
            worker_id=0,
            token_ids=tokens,
            start=0,
            end=len(tokens),
            request_id=uuid.uuid4().hex,
            num_kv_readers=1,
        )

    def end(self, key: Any) -> None:
        self._client.end_session(key.request_id).result(timeout=CALL_SECONDS)

    # ---- tiers ----------------------------------------------------------------------------------------------

    def stored(self, blocks: int) -> None:
        self._files += blocks

    def settle(self) -> None:
        """Until there is a file for every block: they get their names when they are whole."""
        files = self.place.directory / "lmcache"
        wait_until(
            lambda: sum(1 for _ in files.glob("*.data")) >= self._files,
            what="lmcache's files",
            seconds=FILES_SECONDS,
            poll=0.02,
        )

    def forget(self) -> None:
        if self.place.tier is Tier.DISK:
            # Clearing its memory drops the files, too, some time later. There is room for both passes.
            return
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._http}/cache/clear",
            data=b'{"tier": "l1", "force": true}',
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=CALL_SECONDS) as answer:
            if answer.status != 200:
                raise PeerFailed(f"lmcache did not clear its memory: {answer.status}")


class Store(Served):
    def __init__(self, place: Place, *, way: str, threads: int) -> None:
        super().__init__(place, mode="engine_driven", threads=threads)
        self._way = way
        self._transfer: Any = None

    def more_flags(self) -> list[str]:
        return ["--shm-name", f"bench{os.getpid()}", "--no-l1-use-lazy"] if self._way == "shm" else []

    def connect(self) -> None:
        import torch
        from lmcache.v1.multiprocess.transfer_context import EngineDrivenTransferContext

        layout = torch.zeros((1, BLOCK_TOKENS, TOKEN_BYTES), dtype=torch.uint8)
        transfer = EngineDrivenTransferContext(INSTANCE, self._client)
        transfer.register({"layer.0": layout}, MODEL, 1, 1, CALL_SECONDS, layout_hints={"kv_layout": "NHD"})
        self._transfer = transfer.engine_driven_context
        found = type(self._transfer).__name__
        if found != {"shm": "EngineDrivenContextShm", "pickle": "EngineDrivenContextPickle"}[self._way]:
            raise PeerFailed(f"lmcache gave a {found} where {self._way} was asked for")

    def stop(self) -> None:
        if self._transfer is not None:
            self._transfer.close()
            self._transfer = None
        super().stop()

    def put(self, prompt: Prompt, payloads: Sequence[memoryview]) -> None:
        key = self.key(prompt)
        prepared = self._transfer.prepare_store(key, INSTANCE)
        chunks = [_tensor(payload) for payload in payloads]
        if prepared is not None:
            slots, numbers = prepared
            if len(numbers) != len(payloads):
                raise PeerFailed(f"lmcache has room for {len(numbers)} of {len(payloads)} blocks")
            for slot, number in zip(slots, numbers, strict=True):
                slot.copy_(chunks[number])
            chunks = []
        if not self._transfer.commit_store(key, INSTANCE, chunks):
            raise PeerFailed(f"lmcache did not store {len(payloads)} blocks")
        self.end(key)
        self.stored(len(payloads))

    def get(
        self, prompt: Prompt, rooms: Sequence[memoryview], got: Callable[[int], None], *, verify: bool
    ) -> None:
        key = self.key(prompt)
        self.look_up(key, len(rooms))
        slots = self._transfer.prepare_retrieve(key, INSTANCE)
        if slots is None or len(slots) != len(rooms):
            raise PeerFailed(f"lmcache brought {len(slots or [])} of {len(rooms)} blocks")
        for number, (room, slot) in enumerate(zip(rooms, slots, strict=True)):
            _tensor(room).copy_(slot)
            got(number)
        self._transfer.commit_retrieve(key, INSTANCE)
        self.end(key)


def _tensor(memory: memoryview) -> Any:
    import torch

    return torch.frombuffer(memory, dtype=torch.uint8).view(1, BLOCK_TOKENS, TOKEN_BYTES)
