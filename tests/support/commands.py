"""The command line as a shell would run it, without the configuration of whoever runs the tests."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

from tests.support.warm import SERVICE, warm

SECONDS = 60.0

_PROGRAM = """
import sys
from kvstore.cli.main import main
sys.exit(main())
"""


def kvstore(*args: str, environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """`kvstore ARGS` in a process of its own: its exit status and what it wrote."""
    plain = {key: value for key, value in os.environ.items() if not key.startswith("KVSTORE_")}
    return warm(SERVICE).run(_PROGRAM, args, seconds=SECONDS, environment={**plain, **(environ or {})})
