"""Developer chores that are more than one line: `python ops/dev.py proto` makes the generated code again, `golden`
directories of a new disk format, and the client of a new protocol, for the tests."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / ".venv" / "proto-tools"
GENERATED = ROOT / "kvstore" / "v1"
CHART = ROOT / "ops" / "deploy" / "chart"
MANIFESTS = ROOT / "ops" / "deploy" / "kubernetes"
SHAPES = {
    "central": ("mode=central",),
    "daemonset": ("mode=daemonset",),
    "sidecar": ("mode=sidecar", "engine.image=registry.example/engine:1"),
}
"""Each plain manifest, and the chart's values that it is rendered with."""
PROTOS = ("kvstore/v1/cache.proto", "kvstore/v1/worker.proto")


def generate(out: Path) -> None:
    """Write the Python code of all protos below `out`, with the pinned protoc (see the Makefile)."""
    args = [
        f"--proto_path={ROOT / 'proto'}",
        f"--python_out={out}",
        f"--pyi_out={out}",
        f"--grpc_python_out={out}",
        *PROTOS,
    ]
    code = f"import sys; sys.path.insert(0, {str(TOOLS)!r}); from grpc_tools import protoc; sys.exit(protoc.main(['protoc', *{args!r}]))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT / "proto")


def stale() -> list[str]:
    """Names of generated files that differ from what the protos give now."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = {p.name: p.read_bytes() for p in (Path(folder) / "kvstore" / "v1").iterdir()}
    held = {p.name: p.read_bytes() for p in GENERATED.iterdir() if re.search(r"_pb2", p.name) and p.is_file()}
    return sorted(name for name in fresh.keys() | held.keys() if fresh.get(name) != held.get(name))


def manifest(values: Sequence[str]) -> str:
    """What Helm makes of the chart with these values."""
    settings = [word for value in values for word in ("--set", value)]
    return subprocess.run(
        ["helm", "template", "kvstore", str(CHART), *settings], check=True, capture_output=True, text=True
    ).stdout


def main(argv: list[str]) -> int:
    if argv == ["proto"]:
        generate(ROOT)
        return 0
    if argv == ["proto-check"]:
        names = stale()
        if names:
            print(f"stale generated code: {', '.join(names)}; run `make proto`", file=sys.stderr)
        return 1 if names else 0
    if argv == ["manifests"]:
        for shape, values in SHAPES.items():
            (MANIFESTS / f"{shape}.yaml").write_text(manifest(values), encoding="utf-8")
        return 0
    if argv[:1] == ["mutations"]:
        return subprocess.run(
            [sys.executable, ROOT / "ops" / "mutations.py", *argv[1:]], check=False
        ).returncode
    if argv == ["golden"]:
        made = [
            subprocess.run([sys.executable, "-m", f"tests.golden.{what}"], cwd=ROOT, check=False).returncode
            for what in ("directories", "clients")
        ]
        return min(made)
    print("usage: python ops/dev.py proto|proto-check|manifests|mutations|golden", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
