"""Ctrl-C and SIGTERM at random moments of real commands: they end in time, leave nothing behind and harm nothing."""

from __future__ import annotations

import os
import pty
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from kvstore.chaos.mounts import scratch_folder
from kvstore.chaos.tools import what_block_devices_lack, what_mounts_lack
from kvstore.clock import SystemClock
from kvstore.memory import why_not_mapped
from kvstore.store import open_log
from kvstore.store.device import LOCK_NAME, why_not_direct
from tests.support.long import long
from tests.support.service import START_SECONDS, ServiceProcess, short_directory

Require = Callable[[str, bool, str], None]

RECORDS = 8_000
SEGMENT_BYTES = 64 << 20
BUDGET_BYTES = 1 << 30
END_SECONDS = 10.0
"""Two, and what a machine adds that has six others to do as much for."""
MOMENTS = 3
RUNS = [1, long(8)]

# A process that dies leaves its last segment without a footer: the next start looks through all of it.
FILL = f"""
import os, sys
from kvstore.clock import SystemClock
from kvstore.store import open_log
from kvstore.testing.store_suite import make_records

log, _ = open_log(sys.argv[1], budget_bytes={BUDGET_BYTES}, segment_bytes={SEGMENT_BYTES}, clock=SystemClock())
for first in range(0, int(sys.argv[2]), 500):
    log.append(make_records(first, 500, size=3_000))
os._exit(0)
"""


def fill(directory: Path, records: int) -> None:
    subprocess.run([sys.executable, "-c", FILL, str(directory), str(records)], check=True, timeout=120)


def assert_whole(directory: Path, records: int) -> None:
    """It is not locked, and everything is in it."""
    log, recovery = open_log(
        directory, budget_bytes=BUDGET_BYTES, segment_bytes=SEGMENT_BYTES, clock=SystemClock()
    )
    with closing(log):
        assert len(recovery.records) == records
        assert recovery.damaged_records == 0
        for segment_id in log.segment_ids():
            begin: int | None = 0
            while begin is not None:
                step = log.verify(segment_id, begin=begin, bytes_max=64 << 20)
                assert step.damages == []
                begin = step.next


@pytest.fixture
def chance() -> random.Random:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


@contextmanager
def command(*arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A command in a group of its own with a terminal for its stderr, which it tells how far it is: (it, the terminal)."""
    terminal, stderr = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "kvstore.cli.main", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        start_new_session=True,
    )
    os.close(stderr)
    try:
        yield process, terminal
    finally:
        process.kill()
        process.communicate()
        os.close(terminal)


def told(terminal: int) -> str:
    """All that it told, after its end."""
    text = b""
    while True:
        try:
            piece = os.read(terminal, 4096)
        except OSError:  # the way in which a terminal says that nobody has it open any more
            break
        if not piece:
            break
        text += piece
    return text.decode(errors="replace")


def ended_before(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def interrupt(process: subprocess.Popen[bytes], chance: random.Random) -> float:
    """SIGTERM, or SIGINT, which a terminal sends to the whole group; the seconds that it then took to end."""
    return end_by(chance.choice((signal.SIGTERM, signal.SIGINT)), process)


def end_by(number: signal.Signals, process: subprocess.Popen[bytes]) -> float:
    begun = time.monotonic()
    if number is signal.SIGINT:
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGTERM)
    process.wait(10 * END_SECONDS)
    return time.monotonic() - begun


# ---- verify and rebuild-index ------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_verify_or_rebuild_interrupted_at_any_moment_ends_and_leaves_the_store_whole(
    tmp_path: Path, chance: random.Random
) -> None:
    directory = tmp_path / "store"
    fill(directory, RECORDS)
    commands = (("verify",), ("verify",), ("verify", "--rate", "1MiB"), ("rebuild-index",))
    longest, slowest, done, odd = 0.4, 0.0, 0, 0
    for _ in range(10 * MOMENTS):
        chosen, *more = chance.choice(commands)
        with command(chosen, "--dir", str(directory), *more) as (process, terminal):
            os.read(terminal, 1)  # it begins to open the store
            if not ended_before(process, chance.uniform(0.0, longest)):
                slowest = max(slowest, interrupt(process, chance))
            said = told(terminal)
            if process.returncode == 130:
                assert said.rstrip().endswith("kvstore: interrupted")
                done += 1
            else:
                # It came too late: the work was done, and the signal met an interpreter that was about to end.
                assert process.returncode in (0, -signal.SIGTERM, -signal.SIGINT), said
                assert process.stdout is not None
                odd += b" records" not in process.stdout.read()
                longest *= 0.9
        assert_whole(directory, RECORDS)
        if done == MOMENTS:
            break
    assert done == MOMENTS
    assert odd <= 2, "a signal that meets no work meets an answer, but for a moment between the two"
    assert slowest < END_SECONDS
    assert not list(directory.glob("*.aside")), "a rebuild that was ended is undone by the next start"


# ---- bench and chaos ---------------------------------------------------------------------------------------


def interrupted_runs(chance: random.Random, folder: Path, runs: int, *arguments: str) -> None:
    """Each is interrupted at a random moment after it has made its scratch folder below `folder`, by either signal in turn."""
    first = chance.randrange(2)
    for run in range(first, first + runs):
        with command(*arguments, "--dir", str(folder)) as (process, terminal):
            while not any(folder.iterdir()):
                assert not ended_before(process, 0.01), told(terminal)
            assert not ended_before(process, chance.uniform(0.0, 1.5)), told(terminal)
            seconds = end_by((signal.SIGTERM, signal.SIGINT)[run % 2], process)
            assert process.returncode == 130
            assert told(terminal).rstrip().endswith("kvstore: interrupted")
        assert seconds < END_SECONDS
        assert list(folder.iterdir()) == []
        assert str(folder) not in Path("/proc/self/mounts").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize(
    "arguments",
    [
        ("small", "--blocks", "4096"),
        ("storage", "--size", "256MiB"),
        ("restart", "--blocks", "300000"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_bench_interrupted_at_any_moment_removes_what_it_wrote(
    tmp_path: Path, chance: random.Random, arguments: tuple[str, ...], runs: int
) -> None:
    if arguments[0] == "storage" and (reason := why_not_direct(tmp_path / "probe")):
        pytest.skip(f"a file system with O_DIRECT is needed: {reason}")
    interrupted_runs(chance, tmp_path, runs, "bench", *arguments)


@pytest.mark.slow
@pytest.mark.parametrize("runs", RUNS)
def test_a_bench_of_memory_interrupted_at_any_moment_ends_its_service(
    chance: random.Random, runs: int
) -> None:
    if reason := why_not_mapped():
        pytest.skip(f"shared memory is needed: {reason}")
    with short_directory() as folder:
        folder.mkdir()
        interrupted_runs(chance, folder, runs, "bench", "memory", "--size", "64MiB", "--pairs", "1000")
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended since it was listed
                assert os.fsencode(folder) not in path.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize(
    "arguments",
    [
        ("kill", "--rounds", "100000"),
        long(("kill", "--rounds", "100000", "--target", "service")),
        long(("bitflip", "--flips", "1000000")),
        ("nospace",),
        long(("eio",)),
        ("powercut", "--states", "100000"),
    ],
    ids=lambda arguments: "-".join(arguments[::4]),
)
def test_an_attack_interrupted_at_any_moment_removes_what_it_made(
    chance: random.Random, require: Require, arguments: tuple[str, ...], runs: int
) -> None:
    lack = {"nospace": what_mounts_lack, "eio": what_block_devices_lack, "powercut": what_block_devices_lack}
    if arguments[0] in lack:
        reason = lack[arguments[0]]()
        require("mount", not reason, reason)
    with scratch_folder(None) as folder:
        interrupted_runs(chance, folder, runs, "chaos", *arguments)


# ---- a start of the service --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, long(signal.SIGINT)])
def test_a_stop_signal_ends_a_long_start_and_leaves_the_store_whole(number: signal.Signals) -> None:
    records = 40_000
    with short_directory() as directory:
        fill(directory, records)
        (directory / LOCK_NAME).write_bytes(b"")
        service = ServiceProcess(directory, disk=BUDGET_BYTES, segment=SEGMENT_BYTES)
        try:
            service.start(wait=False)
            pause = threading.Event()
            deadline = time.monotonic() + START_SECONDS
            while not (directory / LOCK_NAME).read_bytes():
                assert time.monotonic() < deadline, service.log
                pause.wait(0.01)
            begun = time.monotonic()
            assert service._end(number) == 0, service.log
            assert time.monotonic() - begun < END_SECONDS
            assert "stopped while the store was being opened" in service.log
            assert "ready" not in service.log
            assert "Traceback" not in service.log
        finally:
            if service._process is not None:
                service.kill()
        assert_whole(directory, records)
