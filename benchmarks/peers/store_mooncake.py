"""Mooncake's store over TCP: a master, a node whose memory is the pool, and this process as a client without memory of its own.

Copies: a put goes from registered memory of this process through a TCP socket into the pool; a get the same way back. On
DISK the node has SSD offload: it writes objects out at its heartbeat, once a second, which is the least that can be set.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.peers.base import Peer, PeerFailed, Place, Prompt, Tier
from benchmarks.peers.payloads import address_of
from benchmarks.peers.processes import (
    Server,
    free_ports,
    inherited,
    listens,
    wait_until,
)

BLOCK_BYTES = 449_824
LOCAL_BUFFER_BYTES = 256 << 20
CLIENT_TTL_SECONDS = 3
OFFLOAD_SECONDS = 180.0
_MIB = 1 << 20


class Store(Peer):
    block_bytes = BLOCK_BYTES

    def __init__(self, place: Place, *, threads: int) -> None:
        super().__init__(place)
        self.threads = threads
        self._servers: list[Server] = []
        self._client: Any = None
        self._ports: list[int] = []
        self._names: list[str] = []
        self._kept = 0
        self._registered = False

    def start(self) -> None:
        on_disk = self.place.tier is Tier.DISK
        self._ports = free_ports(5)
        rpc, http, metrics, _, _ = self._ports
        master = [
            str(self.place.scripts / "mooncake_master"),
            f"--rpc_port={rpc}",
            "--rpc_address=127.0.0.1",
            f"--metrics_port={metrics}",
            "--metrics_host=127.0.0.1",
            "--enable_http_metadata_server=true",
            "--http_metadata_server_host=127.0.0.1",
            f"--http_metadata_server_port={http}",
            f"--client_ttl={CLIENT_TTL_SECONDS}",
            f"--enable_offload={str(on_disk).lower()}",
        ]
        self._start("mooncake_master", master, lambda: listens(rpc) and listens(http))
        self._start_node()
        self._registered = False
        self._client = connect(self._ports, self._ports[4], pool=0, offload=None)

    def _start_node(self) -> None:
        """The pool, in a process of its own: it says READY in its log when it is mounted."""
        on_disk = self.place.tier is Tier.DISK
        files = self.place.directory / "mooncake"
        files.mkdir(exist_ok=True)
        task = {
            "ports": self._ports,
            "pool": self.place.set_bytes * 5 // 4 + 256 * _MIB,
            "offload": str(files) if on_disk else None,
        }
        log = self.place.directory / "mooncake_node.log"
        self._start(
            "mooncake_node",
            [sys.executable, "-m", "benchmarks.peers.store_mooncake", json.dumps(task)],
            lambda: "READY" in log.read_text(errors="replace"),
        )

    def _start(self, name: str, command: list[str], ready: Callable[[], bool]) -> None:
        log = self.place.directory / f"{name}.log"
        log.unlink(missing_ok=True)
        server = Server(command, log=log, environment=_environment(str(self.place.directory / "mooncake")))
        self._servers.append(server)
        server.wait_for(ready, what=name)

    def stop(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
        while self._servers:
            self._servers.pop().stop()

    def buffers(self, source: memoryview, room: memoryview) -> None:
        if self._registered:
            return
        self._registered = True
        for each in (source, room):
            if code := self._client.register_buffer(address_of(each), len(each)):
                raise PeerFailed(f"mooncake did not register {len(each)} bytes: {code}")

    def put(self, prompt: Prompt, payloads: Sequence[memoryview]) -> None:
        names = prompt.names()
        self._names += names
        codes = self._client.batch_put_from(
            names, [address_of(each) for each in payloads], [len(each) for each in payloads]
        )
        if any(codes):
            raise PeerFailed(f"mooncake stored {codes.count(0)} of {len(names)} blocks: {min(codes)}")

    def get(
        self, prompt: Prompt, rooms: Sequence[memoryview], got: Callable[[int], None], *, verify: bool
    ) -> None:
        names = prompt.names()
        lengths = self._client.batch_get_into(
            names, [address_of(each) for each in rooms], [len(each) for each in rooms]
        )
        for number, (length, room) in enumerate(zip(lengths, rooms, strict=True)):
            if length != len(room):
                raise PeerFailed(f"mooncake brought {length} of {len(room)} bytes of block {number}")
            got(number)

    def settle(self) -> None:
        """Until the node has written all that is in the pool to its files."""
        wanted = self._kept + len(self._names) * self.block_bytes
        wait_until(lambda: self._offloaded() >= wanted, what="mooncake's offload", seconds=OFFLOAD_SECONDS)

    def _offloaded(self) -> int:
        """Bytes in whole buckets: their description comes last."""
        descriptions = (self.place.directory / "mooncake").glob("*.meta")
        return sum(path.with_suffix(".bucket").stat().st_size for path in descriptions if path.stat().st_size)

    def forget(self) -> None:
        if self.place.tier is Tier.DISK:
            # The pool has room for one pass: what was offloaded may leave it.
            self._kept = self._offloaded()
            self.restart()
        else:
            self._client.remove_all()
        self._names.clear()

    def restart(self) -> None:
        self.stop()
        self.start()


def connect(ports: Sequence[int], own_port: int, *, pool: int, offload: str | None) -> Any:
    """A client of the master, with so many bytes of memory for the pool; `offload`: the folder for its files."""
    from mooncake.store import MooncakeDistributedStore

    rpc, http, *_ = ports
    client = MooncakeDistributedStore()
    options: list[Any] = [] if offload is None else [None, True, offload]
    code = client.setup(
        f"127.0.0.1:{own_port}",
        f"http://127.0.0.1:{http}/metadata",
        pool,
        LOCAL_BUFFER_BYTES,
        "tcp",
        "",
        f"127.0.0.1:{rpc}",
        *options,
    )
    if code:
        raise PeerFailed(f"mooncake's set-up failed: {code}")
    return client


def _environment(files: str) -> dict[str, str]:
    return inherited(
        MC_STORE_MEMCPY="0",
        MC_TCP_ENABLE_CONNECTION_POOL="1",
        MOONCAKE_OFFLOAD_FILE_STORAGE_PATH=files,
        MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR="bucket_storage_backend",
        MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS="1",
        # A prompt's blocks: what does not fill a bucket is not written until it does.
        MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT="64",
        MOONCAKE_OFFLOAD_BUCKET_SIZE_LIMIT_BYTES=str(32 * _MIB),
        MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES=str(LOCAL_BUFFER_BYTES),
    )


def main(text: str) -> int:
    """The node: lends its memory until it is ended."""
    task = json.loads(text)
    node = connect(task["ports"], task["ports"][3], pool=task["pool"], offload=task["offload"])
    print("READY", flush=True)
    try:
        threading.Event().wait()
    finally:
        node.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
