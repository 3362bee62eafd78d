"""The client of every protocol, frozen with a program that uses it: today's service serves it.

`python ops/dev.py golden` freezes the client of today's protocol, for a protocol that has none yet, and overwrites nothing.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from pathlib import Path

from kvstore_client.hello import PROTOCOL
from tests.golden.directories import MTIME

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "clients"
PROGRAM = "core_of_the_suite.py"

_LIST = """
import sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/clients"]
import kvstore_client, kvstore_client.aio, kvstore.profile.registry, kvstore.prefix.keys
print("\\n".join(module.__file__ for module in sys.modules.values() if getattr(module, "__file__", None)))
"""


def files_of_the_client(root: Path) -> list[Path]:
    """Those of a source tree that the client imports, and nothing else."""
    listed = subprocess.run(
        [sys.executable, "-c", _LIST, str(root)], check=True, capture_output=True, text=True, timeout=60
    )
    paths = [Path(line) for line in listed.stdout.splitlines()]
    return sorted({path for path in paths if path.is_relative_to(root) and ".venv" not in path.parts})


def freeze(root: Path, archive: Path) -> None:
    """FileExistsError where it is there."""
    archive.parent.mkdir(exist_ok=True)
    with tarfile.open(archive, "x:xz", preset=9) as tar:
        for path in [*files_of_the_client(root), root / "tests" / "support" / PROGRAM]:
            name = PROGRAM if path.name == PROGRAM else str(path.relative_to(root))
            data = path.read_bytes()
            info = tarfile.TarInfo(name)
            info.size, info.mode, info.mtime = len(data), 0o600, MTIME
            tar.addfile(info, io.BytesIO(data))


def thaw(archive: Path, folder: Path) -> None:
    folder.mkdir()
    with tarfile.open(archive, "r:xz") as tar:
        tar.extractall(folder, filter="data")


if __name__ == "__main__":
    try:
        freeze(ROOT, FOLDER / f"protocol-{PROTOCOL}.tar.xz")
    except FileExistsError:
        sys.exit(f"the client of protocol {PROTOCOL} is there; it is frozen once: raise the protocol")
