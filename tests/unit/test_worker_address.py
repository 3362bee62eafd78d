"""Where workers listen, and what they do about what is there already."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from kvstore.errors import ConfigError
from kvstore_workers.runtime.address import claim, socket_path


@pytest.fixture
def folder() -> Iterator[Path]:
    with TemporaryDirectory(prefix="kv-") as name:
        yield Path(name)


@pytest.mark.parametrize(
    "address", ["", "unix:", "tcp:1", "localhost:50051", "/tmp/x", "unix:" + "/" + "x" * 107]
)
def test_an_address_that_does_not_do_is_refused_by_the_option_s_name(address: str) -> None:
    with pytest.raises(ConfigError, match="--listen"):
        socket_path(address, name="--listen")


def test_the_longest_path_that_a_socket_takes_is_taken() -> None:
    path = "/" + "x" * 106
    assert socket_path(f"unix:{path}", name="--listen") == Path(path)


def test_a_relative_path_is_made_absolute() -> None:
    assert socket_path("unix:w.sock", name="--listen").is_absolute()


def test_the_directory_of_a_socket_is_made_for_this_user_alone(folder: Path) -> None:
    claim(folder / "new" / "w.sock", name="--listen")
    assert (folder / "new").stat().st_mode & 0o777 == 0o700


def test_the_socket_of_a_dead_process_is_removed(folder: Path) -> None:
    path = folder / "w.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    claim(path, name="--listen")
    assert not path.exists()


def test_the_socket_of_a_living_process_is_left_alone(folder: Path) -> None:
    path = folder / "w.sock"
    with socket.socket(socket.AF_UNIX) as living:
        living.bind(str(path))
        living.listen()
        with pytest.raises(ConfigError, match="another process listens there"):
            claim(path, name="--listen")
        assert path.is_socket()


def test_a_file_in_the_socket_s_place_is_left_alone(folder: Path) -> None:
    path = folder / "w.sock"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="something else is there"):
        claim(path, name="--listen")
    assert path.read_text() == "precious"
