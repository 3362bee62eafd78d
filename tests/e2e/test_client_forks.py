"""What a forked child does with its copy of a client: nothing that waits for what is not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.remote import TOKENS, Secrets, make_secrets, port_of
from tests.support.service import ServiceProcess, running_service


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Secrets:
    return make_secrets(tmp_path_factory.mktemp("secrets"))


@pytest.fixture(scope="module")
def service(secrets: Secrets) -> Iterator[ServiceProcess]:
    with running_service(**secrets.options) as process:
        yield process


@pytest.fixture(params=["directory", "tcp"])
def reached(request: pytest.FixtureRequest, service: ServiceProcess, secrets: Secrets) -> dict[str, Any]:
    """What a client is made with."""
    if request.param == "directory":
        return {"address": str(service.directory), "owner": "t"}
    return {
        "address": f"tcp://localhost:{port_of(service)}",
        "owner": "t",
        "token": TOKENS[0],
        "ca": str(secrets.folder / "issuer.pem"),
    }


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_child_may_let_go_of_its_copy_of_a_client(kind: str, reached: dict[str, Any]) -> None:
    # gRPC's own way with forks kills some children whatever they do; without it, only what is asked here counts.
    environment = {**os.environ, "GRPC_ENABLE_FORK_SUPPORT": "0"}
    program = [sys.executable, "-m", "tests.support.forking", kind, json.dumps(reached)]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
