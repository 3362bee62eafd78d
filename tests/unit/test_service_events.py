"""The sender of events over real sockets: what a reader misses is told again, and nobody is waited for."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from kvstore.clock import ManualClock
from kvstore.config import ServiceConfig
from kvstore.core.changes import Journal
from kvstore.errors import ConfigError
from kvstore.events import sending
from kvstore.events.base import BlockRemoved
from kvstore.service import events
from kvstore.service.events import Publisher, check_events
from kvstore.service.timekeeping import ServiceTime
from kvstore_client.events import reader
from tests.support.core import B, CoreRig
from tests.support.events import Follower, endpoints, free_port


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kv-") as made:
        yield Path(made)


class Sender:
    """A core, and the publisher that tells of it, one step at a time."""

    def __init__(self, folder: Path, *, changes: int = 100_000, **options: Any) -> None:
        self.options = {**endpoints(folder), **options}
        self.config = ServiceConfig(dir=str(folder / "s"), **self.options)
        self.journal = Journal(changes)
        self.rig = CoreRig(journal=self.journal)
        self.clock = ManualClock()
        self.publisher = Publisher(
            self.config, core=self.rig.core, journal=self.journal, time=ServiceTime(self.clock)
        )

    async def step(self) -> None:
        self.clock.advance(2.0)
        await self.publisher.step()

    @asynccontextmanager
    async def following(self) -> AsyncIterator[Follower]:
        """A follower, while the publisher goes on."""
        with Follower(self.options) as follower:
            going = asyncio.create_task(self._go())
            try:
                yield follower
            finally:
                going.cancel()

    async def _go(self) -> None:
        while True:
            await self.step()
            await asyncio.sleep(0.005)

    def blocks(self) -> set[bytes]:
        live = self.rig.core._live
        return {live.index.key(slot) for slot in live.index.slots()}

    async def agrees(self, follower: Follower) -> None:
        want = self.blocks()
        await asyncio.to_thread(follower.until, lambda held: held.keys(self.rig.main) == want)


@asynccontextmanager
async def sender_in(folder: Path, **options: Any) -> AsyncIterator[Sender]:
    sender = Sender(folder, **options)
    sender.publisher.open()
    try:
        yield sender
    finally:
        sender.publisher.close()


def short_of_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """One batch, and what the system takes, lies between a sender and its readers."""
    monkeypatch.setattr(sending, "UNREAD_BATCHES_MAX", 1)
    monkeypatch.setattr(sending, "ANSWER_UNREAD_MAX", 1)
    monkeypatch.setattr(reader, "UNREAD_BATCHES_MAX", 1)


async def test_a_reader_that_does_not_keep_up_is_told_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short_of_room(monkeypatch)
    async with sender_in(folder) as sender, sender.following() as follower:
        sender.rig.store(range(5 * B))
        await sender.agrees(follower)
        # It reads nothing while more is sent than lies between the two.
        for seed in range(1, 60):
            sender.rig.store([seed] * (400 * B))
            await sender.step()
        asked = follower.reader.replays_total
        await sender.agrees(follower)
        assert follower.reader.replays_total > asked
        assert follower.missed == 0


async def test_changes_that_come_too_fast_end_in_a_snapshot_that_is_right(folder: Path) -> None:
    async with sender_in(folder, changes=500) as sender, sender.following() as follower:
        await sender.agrees(follower)
        for seed in range(1, 6):
            sender.rig.store([seed] * (300 * B))
        sender.rig.evict(123)
        assert sender.journal.is_lost
        await sender.agrees(follower)
        sender.rig.core.clear()
        await sender.agrees(follower)
        figures = sender.publisher.figures()
        assert figures["events_lost_total"] >= 1
        assert figures["events_snapshots_total"] >= 2
        assert follower.missed == 0


async def test_who_asks_for_more_than_is_kept_is_given_a_snapshot(folder: Path) -> None:
    async with sender_in(folder, events_buffer=1 << 16) as sender:
        for seed in range(1, 20):
            sender.rig.store([seed] * (300 * B))
            await sender.step()
        assert sender.publisher.figures()["events_kept_bytes"] <= 1 << 16
        async with sender.following() as follower:
            await sender.agrees(follower)
            assert sender.publisher.figures()["events_snapshots_total"] == 2
            assert follower.missed == 0


async def test_without_a_place_to_ask_a_loss_is_counted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short_of_room(monkeypatch)
    async with sender_in(folder, events_replay="") as sender, sender.following() as follower:
        sender.rig.store(range(5 * B))
        async with asyncio.timeout(30):
            # What is sent before it is known to listen is not its.
            while not await asyncio.to_thread(follower.reader.read, timeout=0.05):
                sender.rig.evict(1)
                sender.rig.store(range(5 * B))
        for seed in range(1, 60):
            sender.rig.store([seed] * (400 * B))
            await sender.step()
        sender.rig.evict(1)

        async with asyncio.timeout(30):
            # A loss shows when something comes after it, which may be lost too.
            while not follower.missed:
                batch = await asyncio.to_thread(follower.reader.read, timeout=0.05)
                if batch is None:
                    sender.rig.evict(1)
                    sender.rig.store(range(5 * B))
                else:
                    follower.batches.append(batch)
        assert sender.publisher.figures()["events_kept_bytes"] == 0


async def test_an_asker_that_takes_nothing_holds_up_nobody_and_is_given_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short_of_room(monkeypatch)
    async with sender_in(folder) as sender:
        for seed in range(1, 60):
            sender.rig.store([seed] * (400 * B))
            await sender.step()
        context = zmq.Context()
        slow = context.socket(zmq.DEALER)
        try:
            slow.setsockopt(zmq.RCVHWM, 1)
            slow.connect(sender.options["events_replay"])
            slow.send_multipart([b"", bytes(8)])
            async with asyncio.timeout(30):
                while not sender.publisher.sender._answers:
                    await sender.step()
                    await asyncio.sleep(0.01)
            [answer] = sender.publisher.sender._answers
            async with sender.following() as follower:
                await sender.agrees(follower)
            sender.clock.advance(sending.ANSWER_SECONDS_MAX)
            async with asyncio.timeout(30):
                while answer in sender.publisher.sender._answers:
                    await sender.step()
        finally:
            slow.close(0)
            context.term()


async def test_more_askers_than_are_answered_at_once_are_told_the_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "ANSWERS_MAX", 0)
    async with sender_in(folder) as sender:
        await sender.step()
        monkeypatch.setattr(sending, "ANSWERS_MAX", 1)
        sender.publisher.sender._answers.append(sending._Answer(b"nobody", 0, None, 1e12))
        with zmq.Context() as context, context.socket(zmq.DEALER) as asker:
            asker.connect(sender.options["events_replay"])
            asker.send_multipart([b"", bytes(8)])
            async with asyncio.timeout(30):
                while not asker.poll(0):
                    sender.publisher.sender.hear()
                    await asyncio.sleep(0.01)
            assert asker.recv_multipart() == [b"", b"\xff" * 8, b""]
        assert sender.publisher.figures()["events_answers_refused_total"] == 1


async def test_a_question_that_is_none_is_counted_and_has_no_answer(folder: Path) -> None:
    async with sender_in(folder) as sender:
        await sender.step()
        with zmq.Context() as context, context.socket(zmq.DEALER) as asker:
            asker.connect(sender.options["events_replay"])
            asker.send_multipart([b"", b"short"])
            asker.send_multipart([b"x"])
            async with asyncio.timeout(30):
                while sender.publisher.figures()["events_answers_refused_total"] < 2:
                    await sender.step()
                    await asyncio.sleep(0.01)
            assert not asker.poll(0)


async def test_a_step_that_fails_is_counted_and_a_snapshot_follows(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with sender_in(folder) as sender:
        await sender.step()
        monkeypatch.setattr(events, "EVERY_SECONDS", 0.001)
        sender.rig.store(range(3 * B))
        monkeypatch.setattr(sender.publisher, "_tell", lambda changes: 1 / 0)
        running = asyncio.create_task(sender.publisher.run())
        async with asyncio.timeout(30):
            while not sender.publisher.figures()["events_errors_total"]:
                await asyncio.sleep(0.001)
        monkeypatch.undo()
        sender.clock.advance(10.0)
        async with asyncio.timeout(30):
            while sender.publisher.figures()["events_snapshots_total"] < 2:
                await asyncio.sleep(0.001)
                sender.clock.advance(1.0)
        running.cancel()
        assert "ZeroDivisionError" in caplog.text


async def test_what_changed_last_is_told_at_a_stop_and_nothing_is_shown_anew(folder: Path) -> None:
    async with sender_in(folder, changes=10) as sender:
        await sender.step()
        sender.rig.store(range(3 * B))
        await sender.publisher.finish()
        assert sender.publisher.figures()["events_told_total"] == 3
        sender.rig.store([5] * (20 * B))
        assert sender.journal.is_lost
        await sender.publisher.finish()
        assert sender.publisher.figures()["events_snapshots_total"] == 1


def test_an_address_in_use_is_refused_by_name(folder: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        sender = Sender(folder, events=f"tcp://127.0.0.1:{port}")
        with pytest.raises(ConfigError, match=f"events=tcp://127.0.0.1:{port}"):
            sender.publisher.open()


def test_a_file_is_not_removed_for_a_socket_and_a_socket_that_somebody_has_is_not_taken(folder: Path) -> None:
    file = folder / "important"
    file.write_text("what is in it")
    with pytest.raises(ConfigError, match="no socket has that name"):
        Sender(folder, events=f"ipc://{file}").publisher.open()
    assert file.read_text() == "what is in it"
    first = Sender(folder)
    first.publisher.open()
    try:
        with pytest.raises(ConfigError, match="another process listens there"):
            Sender(folder).publisher.open()
    finally:
        first.publisher.close()
    with socket.socket(socket.AF_UNIX) as left:
        # As a kill leaves it.
        left.bind(str(folder / "left"))
    again = Sender(folder, events=f"ipc://{folder / 'left'}")
    again.publisher.open()
    again.publisher.close()


def test_a_reader_that_takes_nothing_is_hung_up_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "UNREAD_SECONDS_MAX", 1.0)
    sender = Sender(folder, events=f"tcp://127.0.0.1:{free_port()}").publisher.sender
    sender.open()
    try:
        with zmq.Context() as context, context.socket(zmq.SUB) as reader:
            seen = sender._pub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            for option, value in ((zmq.RCVHWM, 1), (zmq.RCVBUF, 4096), (zmq.SUBSCRIBE, b"")):
                reader.setsockopt(option, value)
            reader.connect(sender._endpoint)
            assert seen.poll(30_000)
            assert recv_monitor_message(seen)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            batch = [BlockRemoved(block_hashes=tuple(range(2000)), namespace=bytes(32))]
            while not seen.poll(1):
                sender.send(b"", batch, ts=0.0)
            assert recv_monitor_message(seen)["event"] == zmq.EVENT_DISCONNECTED
            sender._pub.disable_monitor()
            seen.close()
    finally:
        sender.close()


def test_a_long_answer_goes_in_turns_also_to_who_takes_it_as_fast(folder: Path) -> None:
    sender = Sender(folder).publisher.sender
    sender.open()
    try:
        sender.kept.begin_snapshot()
        for _ in range(3000):
            sender.kept.add(b"x")
        sender.kept.end_snapshot()
        with zmq.Context() as context, context.socket(zmq.DEALER) as asker:
            asker.setsockopt(zmq.RCVHWM, 0)
            asker.connect(f"ipc://{folder / 'again'}")
            asker.send_multipart([b"", (0).to_bytes(8, "big")])
            came_to: list[int] = []
            while not sender.counts["answers"]:
                sender.hear()
                sender.answer()
                came_to += [answer.at for answer in sender._answers if answer.at is not None]
                while asker.poll(0):
                    asker.recv_multipart()
            turns = [after - before for before, after in pairwise(came_to)]
            assert max(turns) <= sending.ANSWER_AT_ONCE
            assert sum(turns) >= 3000 - 2 * sending.ANSWER_AT_ONCE
    finally:
        sender.close()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"events": "tcp://0.0.0.0:5557"}, "--unsafe-public-events"),
        ({"events": "5557"}, "events=5557"),
        ({"events": "tcp://127.0.0.1:5557", "events_replay": "tcp://*:5558"}, "events_replay"),
        ({"events_replay": "tcp://127.0.0.1:5558"}, "--events"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(options: dict[str, str], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        check_events(ServiceConfig(dir="/d", **options))


def test_events_may_be_public_where_somebody_says_so() -> None:
    check_events(ServiceConfig(dir="/d", events="tcp://*:5557", unsafe_public_events=True))


def test_files_of_sockets_are_for_their_user_alone(folder: Path) -> None:
    sender = Sender(folder)
    sender.publisher.open()
    try:
        assert (folder / "events").stat().st_mode & 0o077 == 0
    finally:
        sender.publisher.close()
