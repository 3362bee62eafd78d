"""A process that announces that it computes a chain, stores a part of it, and then does nothing until it is ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

# It ends with the tests' process, as services do.
_PROGRAM = """
import ctypes, json, sys
ctypes.CDLL(None).prctl(1, 9)
from kvstore_client import CacheClient
from tests.support.calls import look
from tests.support.chains import Chain, identity_of
told = json.loads(sys.argv[1])
with CacheClient(told["directory"], owner="owner") as client:
    namespace = client.open_namespace(identity_of(told["profile"], salt=told["salt"]), name=told["salt"])
    chain = Chain.of(namespace, told["blocks"], seed=told["seed"])
    found = look(client, chain, announce=True)
    assert found.flight is not None, "another one computes it"
    if told["stored"]:
        chain.store(client, last=told["stored"], states=[told["stored"] - 1])
    print(found.flight.id, flush=True)
    sys.stdin.read()
"""


class Owner:
    """It has announced all of the chain, and stored the first blocks and the state at their end, when it is made."""

    def __init__(self, directory: Path, **told: Any) -> None:
        given = {"directory": str(directory), "profile": "tiny", "stored": 0, **told}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the owner ended with {self._process.wait()}"
        self.flight_id = int(line)

    def kill(self) -> None:
        """SIGKILL; returns when the process is gone."""
        self._process.kill()
        self._process.wait()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """SIGSTOP inside, SIGCONT after: the process lives and does nothing."""
        os.kill(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self._process.pid, signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
