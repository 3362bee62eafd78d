"""The client in other people's environments: with the oldest and the newest protobuf and grpcio, and with nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.long import long
from tests.support.remote import TOKENS, make_secrets, port_of
from tests.support.service import ServiceProcess, running_service

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = {
    "oldest": ["protobuf==6.31.*", "grpcio==1.78.*"],
    "newest": ["protobuf", "grpcio"],
}
INSTALL_SECONDS = 150

_PROGRAM = (ROOT / "tests" / "support" / "core_of_the_suite.py").read_text()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServiceProcess, Path]]:
    folder = tmp_path_factory.mktemp("secrets")
    with running_service(handoff=16 << 20, pool=16 << 20, **make_secrets(folder).options) as process:
        yield process, folder


# What is newest is nearly what all other tests run with.
@pytest.fixture(scope="module", params=["oldest", long("newest")])
def python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """(name, interpreter) of an environment with what the client needs; an empty one where pip gets nothing."""
    folder = tmp_path_factory.mktemp(request.param)
    interpreter = str(folder / "bin" / "python")
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=INSTALL_SECONDS
    )
    pip = [sys.executable, "-m", "pip", "--python", interpreter, "--disable-pip-version-check"]
    install = [*pip, "install", "-q", "--no-compile"]
    install += ["--retries", "1", "--timeout", "15"]
    # Only so is it what a user gets, and not what another test's installation has left.
    made = subprocess.run(
        [*install, "--only-binary", ":all:", *ENVIRONMENTS[request.param]],
        capture_output=True,
        text=True,
        timeout=INSTALL_SECONDS,
        check=False,
    )
    if made.returncode:
        return made.stderr.strip()[-300:] or "pip failed", ""
    return request.param, interpreter


@pytest.mark.slow
def test_the_client_works_where_only_grpcio_and_protobuf_are(
    python: tuple[str, str], service: tuple[ServiceProcess, Path], require: Any
) -> None:
    name, interpreter = python
    require("pip", bool(interpreter), f"no environment could be made: {name}")
    process, folder = service
    told = {
        "salt": name,
        "local": str(process.directory),
        "remote": f"tcp://localhost:{port_of(process)}",
        "token": TOKENS[0],
        "ca": str(folder / "issuer.pem"),
    }
    run = subprocess.run(
        [interpreter, "-I", "-W", "error", "-c", _PROGRAM, str(ROOT), json.dumps(told)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    said = json.loads(run.stdout)
    print(f"{name}: {said}")
    assert said["done"] == [
        f"{kind} {way}" for kind in ("sync", "async") for way in ("memory", "unix", "tcp")
    ]
    # What it was tried with is what it was meant to be, and nothing of the service's own environment.
    if name == "oldest":
        assert said["protobuf"].startswith("6.31.")
        assert said["grpcio"].startswith("1.78.")
    assert said["foreign"] == []
