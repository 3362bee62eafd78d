"""What an operator does about the disk: verify, rebuild the index, read the books; and what a bad directory answers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from kvstore.prefix.identity import NamespaceIdentity
from kvstore.prefix.keys import block_keys
from kvstore.profile.registry import get_profile
from kvstore.types import ItemKind
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1 import cache_pb2_grpc
from kvstore_client import CacheClient, Costs, ReserveItem
from tests.support.commands import kvstore
from tests.support.service import ServiceProcess, running_service, short_directory

BLOCKS = 300


def _tokens(blocks: int) -> list[int]:
    return [i % 251 for i in range(32 * blocks)]


def _store_blocks(service: ServiceProcess, *, count: int = BLOCKS) -> list[bytes]:
    """Blocks of one chain, durable; their payloads."""
    with CacheClient(service.directory, owner="test") as client:
        identity = NamespaceIdentity(profile=get_profile("tiny"), weights_revision="w", numerics="n")
        chat = client.open_namespace(identity, name="chat")
        keys = block_keys(chat.digest, _tokens(count), block_tokens=chat.block_tokens)
        payloads = [bytes([i % 251]) * chat.block_bytes for i in range(count)]
        items = [
            ReserveItem(
                kind=ItemKind.BLOCK,
                key=key,
                parent=parent,
                position=(i + 1) * chat.block_tokens,
                length=chat.block_bytes,
            )
            for i, (key, parent) in enumerate(zip(keys, [chat.digest, *keys], strict=False))
        ]
        with client.reserve(chat.digest, items) as reservation:
            reservation.write({i: payloads[i] for i in reservation.granted})
            reservation.commit()
        return payloads


def _held(service: ServiceProcess) -> int:
    """Blocks that a lookup of the whole chain finds."""
    with CacheClient(service.directory, owner="test") as client:
        identity = NamespaceIdentity(profile=get_profile("tiny"), weights_revision="w", numerics="n")
        chat = client.open_namespace(identity, name="chat")
        keys = block_keys(chat.digest, _tokens(BLOCKS), block_tokens=chat.block_tokens)
        found = client.lookup(
            chat.digest,
            keys,
            prompt_tokens=len(_tokens(BLOCKS)) + 1,
            costs=Costs(seconds_per_layer_token=1.0),
            lease=False,
        )
        return int(found.coverage.blocks)


def _flip(directory: Path, payload: bytes) -> None:
    """One bit in the middle of a block, wherever it lies."""
    for path in sorted(directory.glob("segment-*.log")):
        data = bytearray(path.read_bytes())
        at = data.find(payload)
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at + len(payload) // 2)
                file.write(bytes([payload[len(payload) // 2] ^ 1]))
                os.fsync(file.fileno())
            return
    raise AssertionError("the block lies in no segment")


@pytest.fixture
def service() -> Iterator[ServiceProcess]:
    with running_service() as running:
        yield running


def test_a_whole_store_verifies_online_and_offline(service: ServiceProcess) -> None:
    _store_blocks(service)
    online = kvstore("verify", "--socket", str(service.directory / "kvstore.sock"), "--json")
    assert online.returncode == 0, online
    told = json.loads(online.stdout)
    assert told["records"] >= BLOCKS
    assert told["damaged"] == []
    by_directory = kvstore("verify", "--dir", str(service.directory), "--json")
    assert by_directory.returncode == 0, by_directory
    assert json.loads(by_directory.stdout)["bytes"] == told["bytes"]
    service.stop()
    before = sorted(path.name for path in service.directory.iterdir())
    offline = kvstore("verify", "--dir", str(service.directory), "--json")
    assert offline.returncode == 0, offline
    assert json.loads(offline.stdout)["bytes"] == told["bytes"]
    assert sorted(path.name for path in service.directory.iterdir()) == before


def test_damage_found_online_is_named_and_a_miss_from_then_on(service: ServiceProcess) -> None:
    payloads = _store_blocks(service)
    assert _held(service) == BLOCKS
    _flip(service.directory, payloads[200])
    done = kvstore("verify", "--socket", str(service.directory / "kvstore.sock"), "--json")
    assert done.returncode == 1, done
    [damage] = json.loads(done.stdout)["damaged"]
    assert damage["length"] == len(payloads[200])
    assert len(damage["key"]) == 64
    assert _held(service) == 200
    with CacheClient(service.directory, owner="test") as client:
        values = client.stats()
    assert values["damaged_blocks_total"] == 1
    assert values["log_quarantined_records_total"] == 1
    again = kvstore("verify", "--socket", str(service.directory))
    assert again.returncode == 0, again
    assert "all whole" in again.stdout


def test_a_bent_description_is_written_anew_while_the_service_runs(service: ServiceProcess) -> None:
    _store_blocks(service)
    _flip(service.directory, b'"geometry"')
    done = kvstore("verify", "--socket", str(service.directory), "--json")
    assert done.returncode == 1, done
    assert len(json.loads(done.stdout)["damaged"]) == 1
    again = kvstore("verify", "--socket", str(service.directory))
    assert again.returncode == 0, again
    service.stop()
    (service.directory / "catalog.mdb").unlink()
    with ServiceProcess(service.directory) as restarted:
        assert _held(restarted) == BLOCKS


def test_one_verify_at_a_time_and_none_that_never_ends(service: ServiceProcess) -> None:
    _store_blocks(service, count=20 * BLOCKS)
    with grpc.insecure_channel(service.target) as channel:
        admin = cache_pb2_grpc.AdminStub(channel)
        with pytest.raises(grpc.RpcError, match="bytes_per_second=1"):
            list(admin.Verify(pb.VerifyRequest(bytes_per_second=1)))
        # Twenty seconds' worth and more at the lowest rate.
        first = admin.Verify(pb.VerifyRequest(bytes_per_second=1 << 20))
        next(first)
        assert not first.done()
        with pytest.raises(grpc.RpcError, match="verified already"):
            list(admin.Verify(pb.VerifyRequest()))
        first.cancel()
        for _ in range(100):
            try:
                [*_, last] = admin.Verify(pb.VerifyRequest())
                break
            except grpc.RpcError:
                continue
        assert last.done
        assert last.records >= BLOCKS


def test_damage_found_offline_is_named(service: ServiceProcess) -> None:
    payloads = _store_blocks(service)
    service.stop()
    _flip(service.directory, payloads[10])
    done = kvstore("verify", "--dir", str(service.directory))
    assert done.returncode == 1, done
    assert "1 DAMAGED" in done.stdout
    service.start()
    assert _held(service) in (10, BLOCKS)


def test_a_segment_that_was_cut_off_is_lost_records(service: ServiceProcess) -> None:
    _store_blocks(service)
    service.stop()
    segment = max(service.directory.glob("segment-*.log"), key=lambda path: path.stat().st_size)
    os.truncate(segment, segment.stat().st_size // 2)
    done = kvstore("verify", "--dir", str(service.directory), "--json")
    assert done.returncode == 1, done
    told = json.loads(done.stdout)
    assert told["lost"] > 0
    assert told["damaged"] == []
    service.start()
    assert 0 < _held(service) < BLOCKS


def test_a_segment_whose_file_is_gone_is_told(service: ServiceProcess) -> None:
    _store_blocks(service)
    service.stop()
    max(service.directory.glob("segment-*.log"), key=lambda path: path.stat().st_size).unlink()
    done = kvstore("verify", "--dir", str(service.directory))
    assert done.returncode == 1, done
    assert "1 MISSING (segments)" in done.stdout
    assert "LOST" not in done.stdout


def test_an_index_that_had_to_be_rebuilt_is_told(service: ServiceProcess) -> None:
    _store_blocks(service)
    service.stop()
    (service.directory / "catalog.mdb").unlink()
    copy = service.directory.with_name("copy")
    shutil.copytree(service.directory, copy, ignore=shutil.ignore_patterns("*.sock"))
    done = kvstore("verify", "--dir", str(copy))
    assert done.returncode == 1, done
    assert "index REBUILT" in done.stdout
    assert "last uses are lost" in done.stdout
    done = kvstore("verify", "--dir", str(service.directory), "--json")
    told = json.loads(done.stdout)
    assert (done.returncode, told["index_rebuilt"], told["lost"], told["damaged"]) == (1, True, 0, [])
    again = kvstore("verify", "--dir", str(service.directory), "--json")
    assert (again.returncode, json.loads(again.stdout)["index_rebuilt"]) == (0, False)


def test_a_damaged_segment_header_is_not_called_a_lost_record(service: ServiceProcess) -> None:
    _store_blocks(service)
    service.stop()
    segment = max(service.directory.glob("segment-*.log"), key=lambda path: path.stat().st_size)
    with segment.open("r+b") as file:
        file.seek(4000)
        file.write(b"bent")
    done = kvstore("verify", "--dir", str(service.directory), "--json")
    assert done.returncode == 1, done
    told = json.loads(done.stdout)
    assert (told["lost"], told["damaged_segments"], told["missing_segments"]) == (0, 1, 0)
    assert [damage["what"] for damage in told["damaged"]] == ["segment header"]


def test_a_rebuilt_index_finds_everything(service: ServiceProcess) -> None:
    _store_blocks(service)
    refused = kvstore("rebuild-index", "--dir", str(service.directory))
    assert refused.returncode == 1
    assert "another process" in refused.stderr
    service.stop()
    (service.directory / "catalog.mdb").write_bytes(b"nothing of use" * 1000)
    done = kvstore("rebuild-index", "--dir", str(service.directory), "--json")
    assert done.returncode == 0, done
    found = json.loads(done.stdout)
    assert found["kinds"] == {"block": BLOCKS, "namespace": 1}
    assert found["damaged_records"] == 0
    assert not (service.directory / "catalog.mdb.aside").exists()
    service.start()
    assert "rebuilt" not in service.log
    assert _held(service) == BLOCKS


def test_the_books_agree_with_the_file_system(service: ServiceProcess) -> None:
    _store_blocks(service)
    done = kvstore("stats", "--dir", str(service.directory), "--json")
    values = json.loads(done.stdout)
    accounted = sum(values[f"disk_{name}_bytes"] for name in ("live", "dead", "padded", "reserved"))
    assert accounted == values["disk_allocated_bytes"]
    files = [path for path in service.directory.iterdir() if path.is_file()]
    taken = sum(path.stat().st_blocks * 512 for path in files)
    assert taken == pytest.approx(accounted + values["disk_other_bytes"], rel=0.01)
    assert values["disk_spare_bytes"] <= values["disk_reserved_bytes"]
    assert values["device_bytes_per_payload_byte"] >= 1
    assert values["direct_io"] in (0, 1)
    assert ("pass through the page cache" in service.log) == (values["direct_io"] == 0)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("verify",), ("no directory given", "--socket")),
        (("verify", "--dir", "/nowhere"), ("no such directory",)),
        (("verify", "--socket", "/nowhere"), ("no service listens there",)),
        (("verify", "--dir", ".", "--rate", "1"), ("--rate", "1MiB or more")),
        (("rebuild-index", "--dir", "/proc"), ("holds no store",)),
    ],
)
def test_wrong_input_is_one_line_that_says_what_is_allowed(
    args: tuple[str, ...], words: tuple[str, ...]
) -> None:
    done = kvstore(*args)
    assert done.returncode == 1, done
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    for word in words:
        assert word in done.stderr


def test_an_empty_directory_stays_empty() -> None:
    with short_directory() as directory:
        directory.mkdir()
        assert "the directory holds no store" in kvstore("verify", "--dir", str(directory)).stderr
        assert "the directory holds no store" in kvstore("rebuild-index", "--dir", str(directory)).stderr
        assert list(directory.iterdir()) == []


def test_a_failed_rebuild_leaves_the_index_as_it_was(service: ServiceProcess) -> None:
    _store_blocks(service)
    service.stop()
    index = (service.directory / "catalog.mdb").read_bytes()
    identity = service.directory / "identity"
    kept = shutil.copy(identity, identity.with_name("identity.kept"))
    identity.write_bytes(b"not ours")
    done = kvstore("rebuild-index", "--dir", str(service.directory))
    assert done.returncode == 1
    assert "identity" in done.stderr
    assert (service.directory / "catalog.mdb").read_bytes() == index
    Path(kept).rename(identity)
    service.start()
    assert _held(service) == BLOCKS


@pytest.mark.parametrize("command", ["verify", "rebuild-index", "serve"])
def test_a_directory_without_permission_is_one_line_and_nothing_is_touched(
    service: ServiceProcess, require: Callable[[str, bool, str], None], command: str
) -> None:
    _store_blocks(service)
    service.stop()
    # Root without its right to pass by permissions is like everybody else.
    drop = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all"]
    can_drop = shutil.which("setpriv") is not None and os.geteuid() == 0
    require("mount", can_drop or os.geteuid() != 0, "setpriv (package util-linux) and root are needed")
    service.directory.chmod(0)
    try:
        done = subprocess.run(
            [
                *(drop if can_drop else []),
                sys.executable,
                *("-m", "kvstore.cli.main", command, "--dir", str(service.directory)),
            ],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    finally:
        service.directory.chmod(0o700)
    assert done.returncode == 1, done
    assert done.stderr.count("\n") == 1, done.stderr
    assert "ermission" in done.stderr
    service.start()
    assert _held(service) == BLOCKS
