"""What the process asks of the operating system."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.service.process import check_space

_PROGRAM = """
import logging, resource, sys
logging.basicConfig()
from kvstore.service.process import allow_descriptors
soft, hard, needed = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
allow_descriptors(needed)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(
    ("soft", "hard", "needed", "after", "warns"),
    [(64, 256, 200, 200, False), (100, 256, 80, 100, False), (64, 128, 300, 128, True)],
    ids=["raised", "enough already", "no further than allowed"],
)
def test_the_limit_of_open_files_follows_what_the_sessions_need(
    soft: int, hard: int, needed: int, after: int, warns: bool
) -> None:
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= hard
    arguments = [sys.executable, "-c", _PROGRAM, str(soft), str(hard), str(needed)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert int(done.stdout) == after
    assert ("open files are limited" in done.stderr) is warns


def test_files_that_vanish_while_they_are_counted_are_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stays").write_bytes(bytes(8192))
    (tmp_path / "goes").write_bytes(bytes(8192))
    lstat = Path.lstat

    def vanishing(path: Path) -> os.stat_result:
        if path.name == "goes":
            path.unlink(missing_ok=True)
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", vanishing)
    check_space(tmp_path, need_bytes=4096, budget_bytes=4096)
    assert not (tmp_path / "goes").exists()
