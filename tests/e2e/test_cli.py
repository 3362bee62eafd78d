"""The command line as an operator meets it: real processes, exit codes, one-line errors."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import google_crc32c
import pytest

from kvstore.prefix.identity import NamespaceIdentity
from kvstore.profile.registry import get_profile
from kvstore.store.format import FORMAT_VERSION
from kvstore.store.identity import IDENTITY_NAME
from kvstore_client import CacheClient
from tests.support.service import ServiceProcess, running_service, short_directory


def _kvstore(*args: str, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith("KVSTORE_")}
    return subprocess.run(
        [sys.executable, "-m", "kvstore.cli.main", *args],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**env, **(environ or {})},
    )


@pytest.fixture
def service():
    with running_service() as running:
        yield running


def _open_tiny(service: ServiceProcess) -> None:
    with CacheClient(service.directory, owner="test") as client:
        identity = NamespaceIdentity(profile=get_profile("tiny"), weights_revision="w", numerics="n")
        client.open_namespace(identity, name="chat")


def _refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 1, done
    assert done.stdout == ""
    assert done.stderr.startswith("kvstore")
    assert done.stderr.count("\n") == 1, done.stderr
    for word in words:
        assert word in done.stderr


def test_stats_policy_clear_and_drain_answer_in_text_and_json(
    service: ServiceProcess, tmp_path: Path
) -> None:
    _open_tiny(service)
    where = ("--dir", str(service.directory))

    shown = _kvstore("policy", "show", *where)
    assert (shown.returncode, "chat" in shown.stdout, "endpoints" in shown.stdout) == (0, True, True)
    assert _kvstore("policy", "set", "chat", "periodic:64", *where).returncode == 0
    after = json.loads(_kvstore("policy", "show", *where, "--json").stdout)
    assert after["chat"]["policy"] == "periodic:64"

    file = tmp_path / "stats.json"
    stats = _kvstore("stats", *where, "--json", str(file))
    assert stats.returncode == 0
    assert json.loads(file.read_text())["namespaces"] == 1

    cleared = json.loads(_kvstore("clear", "--all", *where, "--json").stdout)
    assert cleared == {"blocks": 0, "states": 0}
    dropped = json.loads(_kvstore("clear", "--all", "--states", "pool", *where, "--json").stdout)
    assert dropped == {"dropped": 0, "kept_leased": 0}
    assert json.loads(_kvstore("drain", *where, "--timeout", "1s", "--json").stdout) == {"left_open": 0}


def test_the_directory_may_come_from_the_environment(service: ServiceProcess) -> None:
    done = _kvstore("stats", "blocks", environ={"KVSTORE_DIR": str(service.directory)})
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("policy", "set", "chat", "periodic:33"), ("33", "32")),
        (("policy", "set", "chat", "sometimes"), ("sometimes", "zero")),
        (("policy", "set", "nobody", "zero"), ("nobody", "chat")),
        (("clear", "--namespace", "../chat"), ("../chat",)),
        (("stats", "no-such-figure"), ("no-such-figure",)),
    ],
)
def test_wrong_input_is_one_line_that_says_what_is_allowed(
    service: ServiceProcess, args: tuple[str, ...], words: tuple[str, ...]
) -> None:
    _open_tiny(service)
    _refused(_kvstore(*args, "--dir", str(service.directory)), *words)


def test_no_service_is_one_line_that_says_what_to_do() -> None:
    with short_directory() as directory:
        _refused(_kvstore("stats", "--dir", str(directory)), "kvstore serve")


def test_a_directory_in_use_is_refused_and_its_service_goes_on(service: ServiceProcess) -> None:
    _refused(_kvstore("serve", "--dir", str(service.directory)), str(service.directory), "use")
    assert _kvstore("stats", "--dir", str(service.directory)).returncode == 0


def test_a_directory_of_a_newer_format_is_refused_by_name_and_left_alone() -> None:
    with short_directory() as directory:
        with ServiceProcess(directory) as running:
            assert running.stop() == 0
        identity = bytearray((directory / IDENTITY_NAME).read_bytes())
        identity[8:12] = (FORMAT_VERSION + 998).to_bytes(4, "little")
        identity[-4:] = google_crc32c.value(bytes(identity[:-4])).to_bytes(4, "little")
        (directory / IDENTITY_NAME).write_bytes(identity)
        before = {p.name: p.stat().st_size for p in directory.iterdir()}
        _refused(_kvstore("serve", "--dir", str(directory)), str(FORMAT_VERSION + 998), str(FORMAT_VERSION))
        assert {p.name: p.stat().st_size for p in directory.iterdir()} == before


def test_a_directory_of_somebody_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("mine")
    _refused(_kvstore("serve", "--dir", str(tmp_path)), str(tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["letter.txt"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--disk", "64XiB"), ("--disk=64XiB", "GiB")),
        (("--disk", "1KiB"), ("--disk",)),
        (("--retention", "3 weeks"), ("--retention",)),
        (("--policy", "sometimes"), ("sometimes",)),
        (("--config", "/nonexistent.toml"), ("/nonexistent.toml",)),
        (("--metrics", "nowhere"), ("nowhere",)),
    ],
)
def test_serve_refuses_bad_options(tmp_path: Path, args: tuple[str, ...], words: tuple[str, ...]) -> None:
    _refused(_kvstore("serve", "--dir", str(tmp_path / "d"), *args), *words)


def test_a_directory_without_space_is_refused(
    tmp_path: Path, require: Callable[[str, bool, str], None]
) -> None:
    mount = tmp_path / "m"
    mount.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)],
        capture_output=True,
        text=True,
        check=False,
    )
    require("mount", mounted.returncode == 0, f"cannot mount a small tmpfs: {mounted.stderr.strip()}")
    try:
        _refused(_kvstore("serve", "--dir", str(mount / "d"), "--disk", "1GiB"), "space")
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_workers_and_gateway_refuse_bad_options() -> None:
    for args, words in (
        (("worker", "prefill", "--listen", "unix:/tmp/x.sock", "--profile", "gpt"), ("gpt", "tiny")),
        (("worker", "prefill", "--listen", "tcp:1"), ("tcp:1",)),
        (
            ("worker", "decode", "--listen", "unix:/tmp/x.sock", "--checkpoint", "/nonexistent"),
            ("/nonexistent",),
        ),
        (("demo", "--turns", "3"), ("--turns=3",)),
        (("demo", "--files", "/nonexistent"), ("/nonexistent",)),
        (("demo", "--json", "/nonexistent/demo.json"), ("--json", "/nonexistent/demo.json")),
    ):
        _refused(_kvstore(*args), *words)


def test_the_readmes_client_example_runs_as_written(service: ServiceProcess, tmp_path: Path) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    examples = [
        block for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "CacheClient" in block
    ]
    assert len(examples) == 1
    program = tmp_path / "example.py"
    program.write_text(examples[0].replace("/data/kv", str(service.directory)))
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "compute_from=64" in done.stdout
    assert done.stdout.endswith("0 True\n1 True\n")


def test_an_answer_that_cannot_be_written_is_an_error_of_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "kvstore.cli.main", "profiles"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=60,
        )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "No space left" in done.stderr
