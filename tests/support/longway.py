"""A second way between two hosts, long and lossy: packets pass through this process, which delays all of them and drops
some. Kernels without netem have it too."""

from __future__ import annotations

import fcntl
import os
import random
import selectors
import struct
import threading
import time
from collections import deque
from types import TracebackType
from typing import Self

from tests.support.netns import Hosts, command, inside

SERVICE_IP, CLIENT_IP = "10.77.1.1", "10.77.1.2"
PACKETS_MAX = 4000
"""On their way at once; more are dropped, as a router does."""
_PACKET_BYTES = 1500
_TUNSETIFF = 0x400454CA
_IFF_TUN_WITHOUT_HEADER = 0x1001


class LongWay:
    """The device `far` in both namespaces. `delay`: seconds each way; `loss`: the share of packets that is dropped."""

    def __init__(self, hosts: Hosts, *, delay: float, loss: float, seed: int) -> None:
        self._delay = delay
        self._loss = loss
        self._random = random.Random(seed)
        self.passed = self.dropped = 0
        self._woken, self._wake = os.pipe()
        self._ends = (_device(hosts.service, SERVICE_IP), _device(hosts.client, CLIENT_IP))
        self._thread = threading.Thread(target=self._run, name="long-way")

    def _run(self) -> None:
        one, other = self._ends
        to = {one: other, other: one}
        # All take equally long, so that they arrive in the order of their departure.
        under_way: deque[tuple[float, int, bytes]] = deque()
        with selectors.DefaultSelector() as selector:
            for descriptor in (one, other, self._woken):
                selector.register(descriptor, selectors.EVENT_READ)
            while True:
                wait = None if not under_way else max(0.0, under_way[0][0] - time.monotonic())
                for key, _ in selector.select(wait):
                    if key.fd == self._woken:
                        return
                    for packet in _packets(key.fd):
                        if self._random.random() < self._loss or len(under_way) == PACKETS_MAX:
                            self.dropped += 1
                        else:
                            under_way.append((time.monotonic() + self._delay, to[key.fd], packet))
                now = time.monotonic()
                while under_way and under_way[0][0] <= now:
                    _, end, packet = under_way.popleft()
                    _send(end, packet)
                    self.passed += 1

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.write(self._wake, b"x")
        self._thread.join()
        for descriptor in (*self._ends, self._wake, self._woken):
            os.close(descriptor)


def _device(name: str, address: str) -> int:
    """A new device in that namespace; what is sent to it is read from the descriptor."""
    with inside(name):
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", b"far", _IFF_TUN_WITHOUT_HEADER))
    command("ip", "-n", name, "address", "add", f"{address}/24", "dev", "far")
    command("ip", "-n", name, "link", "set", "far", "mtu", f"{_PACKET_BYTES}", "up")
    return descriptor


def _packets(descriptor: int) -> list[bytes]:
    """Some of those that wait."""
    found: list[bytes] = []
    try:
        while len(found) < 64:
            found.append(os.read(descriptor, _PACKET_BYTES))
    except BlockingIOError:
        return found
    return found


def _send(descriptor: int, packet: bytes) -> None:
    try:
        os.write(descriptor, packet)
    except BlockingIOError:
        # The other end's queue is full: lost, as on any way.
        return
