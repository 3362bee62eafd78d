"""Two hosts on one machine: network namespaces with a cable between them that has a rate, can be cut, and is removed with
them. Linux, as root."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

SERVICE_IP, CLIENT_IP = "10.77.0.1", "10.77.0.2"
"""Of the cable's ends. They mean something in the two namespaces only."""
COMMAND_SECONDS = 20.0
BURST_BYTES = 64 << 10
QUEUE_MS = 30

_CLONE_NEWNET = 0x40000000
_PLACE = Path("/run/netns")
_NAME = re.compile(r"kvstore-([0-9]+)-(?:service|client)")
_CAP_SYS_ADMIN = 21


def what_hosts_lack() -> str:
    """Why there can be no hosts of our own here; empty when there can."""
    missing = [name for name in ("ip", "tc", "ss") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed: the Debian package iproute2 has them"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "/dev/net/tun is not there, or not for this user"
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("CapEff:") and not int(line.split()[1], 16) >> _CAP_SYS_ADMIN & 1:
            return "network namespaces need root (CAP_SYS_ADMIN)"
    return ""


def command(*words: str) -> str:
    """Run it to its end; what it printed."""
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=COMMAND_SECONDS)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}"
    return done.stdout


@contextmanager
def inside(name: str) -> Iterator[None]:
    """The calling thread in that namespace, and what it makes meanwhile: sockets, processes, threads."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _enter(_PLACE / name)
        try:
            yield
        finally:
            _set_namespace(before)
    finally:
        os.close(before)


def _enter(place: Path) -> None:
    descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _set_namespace(descriptor)
    finally:
        os.close(descriptor)


def _set_namespace(descriptor: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")


@dataclass(frozen=True)
class Hosts:
    """`service` and `client` are the namespaces' names; the cable's end is `wire` in both. Any process may use it."""

    service: str
    client: str

    def limit(self, mbit: float) -> None:
        """What the cable carries each way from now on, in Mbit/s."""
        for name in (self.service, self.client):
            self._queue(
                name, "tbf", "rate", f"{mbit:g}mbit", "burst", f"{BURST_BYTES}", "latency", f"{QUEUE_MS}ms"
            )

    def unlimit(self) -> None:
        for name in (self.service, self.client):
            self._queue(name, "pfifo", "limit", "1000")

    def lose_answers(self) -> None:
        """Nothing that the service's host says arrives any more; what is said to it does, for as long as clients send
        without being told that it came."""
        self._queue(self.service, "pfifo", "limit", "0")

    def cut(self) -> None:
        """Neither end is told: connections stay as they are."""
        command("ip", "-n", self.service, "link", "set", "wire", "down")

    def mend(self) -> None:
        command("ip", "-n", self.service, "link", "set", "wire", "up")

    def carried_bytes(self, device: str = "wire") -> int:
        """From the service's host to the client's, all headers included."""
        [told] = json.loads(command("ip", "-n", self.service, "-s", "-j", "link", "show", device))
        return int(told["stats64"]["tx"]["bytes"])

    def reset_busiest(self, client_ip: str = CLIENT_IP) -> None:
        """Reset the connection over which the service's host has sent most to that address."""
        listed = command("ip", "netns", "exec", self.service, "ss", "-tinHO", "state", "established")
        # A service that listens on all addresses sees IPv4 as a part of IPv6.
        peer = re.compile(
            rf"\s(\[::ffff:{re.escape(client_ip)}\]:\d+|{re.escape(client_ip)}:\d+)\s.*bytes_sent:(\d+)"
        )
        sent = {found[1]: int(found[2]) for line in listed.splitlines() if (found := peer.search(line))}
        assert sent, f"no connection to reset in: {listed}"
        busiest = max(sent, key=lambda end: sent[end])
        command("ip", "netns", "exec", self.service, "ss", "-K", "-tnH", "dst", busiest)
        left = command(
            "ip", "netns", "exec", self.service, "ss", "-tnH", "state", "established", "dst", busiest
        )
        assert not left, "ss -K reset nothing: the kernel has no CONFIG_INET_DIAG_DESTROY"

    def _queue(self, name: str, *words: str) -> None:
        command("tc", "-n", name, "qdisc", "replace", "dev", "wire", "root", *words)


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Fresh ones with this process's number in their names. What processes that are gone left is removed first."""
    _remove_leftovers()
    hosts = Hosts(f"kvstore-{os.getpid()}-service", f"kvstore-{os.getpid()}-client")
    try:
        for name in (hosts.service, hosts.client):
            command("ip", "netns", "add", name)
        command(
            *("ip", "link", "add", "wire", "netns", hosts.service),
            *("type", "veth", "peer", "name", "wire", "netns", hosts.client),
        )
        for name, address in ((hosts.service, SERVICE_IP), (hosts.client, CLIENT_IP)):
            command("ip", "-n", name, "address", "add", f"{address}/24", "dev", "wire")
            for device in ("lo", "wire"):
                command("ip", "-n", name, "link", "set", device, "up")
        yield hosts
    finally:
        for name in (hosts.service, hosts.client):
            if (_PLACE / name).exists():
                command("ip", "netns", "delete", name)


def _remove_leftovers() -> None:
    for each in _PLACE.glob("kvstore-*"):
        found = _NAME.fullmatch(each.name)
        if found and not Path(f"/proc/{found[1]}").exists():
            command("ip", "netns", "delete", each.name)


def run_there(name: str, scenario: Callable[..., None], *given: object, seconds: float) -> None:
    """`scenario(*given)` in a process of its own whose whole network is that namespace. AssertionError with its trace where
    it raises, dies, or takes longer."""
    context = get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_there, args=(name, theirs, scenario, given))
    process.start()
    theirs.close()
    try:
        assert ours.poll(seconds), f"{scenario.__name__} is not over after {seconds:g} s"
        trace = ours.recv()
    except EOFError:
        process.join()
        raise AssertionError(f"{scenario.__name__} ended with {process.exitcode} and no word") from None
    finally:
        process.kill()
        process.join()
        ours.close()
    assert not trace, trace


def _there(name: str, result: Connection, scenario: Callable[..., None], given: tuple[object, ...]) -> None:
    trace = ""
    try:
        # Before there is any other thread: threads begin where the one is that makes them.
        _enter(_PLACE / name)
        scenario(*given)
    except BaseException:  # noqa: BLE001 -- told to the test's process, whatever it is
        trace = traceback.format_exc()
    result.send(trace)
