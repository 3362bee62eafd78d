"""vLLM's scheduler with DeepSeek V4's cache groups at full size, over a real service: what a restorable boundary takes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvstore.profile.registry import get_profile
from kvstore_client import CacheClient
from tests.engines.running import ROOT, engine_environment, note
from tests.support.service import running_service

PYTHON = os.environ.get("KVSTORE_ENGINE_PYTHON", "")
TOKENS = 2048

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="needs an environment with vLLM: make test-engines"),
    pytest.mark.timeout(600),
]


def planned(address: Path, log: Path) -> dict[str, Any]:
    read, write = os.pipe()
    program = ROOT / "tests" / "engines" / "v4_scheduler.py"
    with log.open("wb") as out, os.fdopen(read) as answers:
        try:
            done = subprocess.run(
                [PYTHON, program, str(address), str(write)],
                pass_fds=(write,),
                stdout=out,
                stderr=out,
                env=engine_environment(),
                timeout=500,
                check=False,
            )
        finally:
            os.close(write)
        assert done.returncode == 0, log.read_text(errors="replace")[-6000:]
        found: dict[str, Any] = json.load(answers)
        return found


def test_a_prompt_of_five_groups_is_found_again_and_a_boundary_has_its_price(tmp_path: Path) -> None:
    with running_service() as service, CacheClient(service.directory, owner="tests") as client:
        found = planned(service.directory, tmp_path / "scheduler.log")
        stats = client.stats()
    assert found["groups"] == [[64, 22], [64, 21], [256, 62], [4, 42], [8, 20]]
    assert (found["scheduler_block"], found["hash_block"], found["row_bytes"]) == (256, 4, 1_003_520)
    cold, warm = found["cold"], found["warm"]
    assert (cold["cached"], warm["cached"]) == (0, TOKENS)
    assert stats["committed_bytes_total"] == cold["rows_stored"] * found["row_bytes"]
    # What was found is one boundary and the entries of all tokens before it.
    assert warm["rows_loaded"] == TOKENS // 256 + 22
    boundary = 22 * found["row_bytes"]
    state = get_profile("deepseek-v4-flash").state_bytes
    note(
        "deepseek-v4",
        "boundary",
        rows_stored=cold["rows_stored"],
        stored_bytes=stats["committed_bytes_total"],
        rows_loaded=warm["rows_loaded"],
        boundary_bytes=boundary,
        own_state_bytes=state,
    )
    assert boundary > 6 * state
