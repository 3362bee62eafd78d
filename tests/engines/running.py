"""An engine process that tests ask, kill and start again."""

from __future__ import annotations

import json
import os
import select
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self
from uuid import uuid4

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 240.0
ANSWER_SECONDS = 60.0


class Answer(NamedTuple):
    """`cached`: how many of the prompt's tokens were not computed."""

    tokens: list[int]
    logprob: float
    cached: int
    why: str


def engine_environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'clients'}", "OMP_NUM_THREADS": "1"}


def note(model: str, scenario: str, **figures: Any) -> None:
    """Kept for who asks for it: one JSON object a line in the file that KVSTORE_ENGINE_RESULTS names."""
    target = os.environ.get("KVSTORE_ENGINE_RESULTS")
    if target:
        with Path(target).open("a") as file:
            print(json.dumps({"model": model, "scenario": scenario, **figures}), file=file)


class Engine:
    """Ready inside a `with`, ended in order on leaving it, or killed."""

    def __init__(
        self,
        python: Path,
        model: Path,
        log: Path,
        *,
        pool_bytes: int = 64 << 20,
        model_tokens: int = 2048,
        tier: dict[str, Any] | None = None,
        **own: Any,
    ) -> None:
        """`own`: what this store's tier is told. `tier`: another one instead, of vLLM's; empty: no connector."""
        self._python = python
        self._log = log
        self._name = f"tests-{uuid4().hex}"
        self._options = {
            "name": self._name,
            "model": str(model),
            "pool_bytes": pool_bytes,
            "device_blocks": model_tokens // 8,
            "model_tokens": model_tokens,
            "tier": {"type": "KvstoreTier", "module_path": "kvstore_vllm.tier", **own}
            if tier is None
            else tier,
        }

    def __enter__(self) -> Self:
        read, write = os.pipe()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    self._python,
                    ROOT / "tests" / "engines" / "engine.py",
                    json.dumps({**self._options, "answers": write}),
                ],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=engine_environment(),
                pass_fds=(write,),
            )
        os.close(write)
        self._answers = os.fdopen(read)
        try:
            assert self._take(START_SECONDS) == {"ready": True}
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None and error is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                status = self._process.wait(60)
            finally:
                self.kill()
            assert status == 0, f"the engine ended with {status}:\n{self.log_end}"
            assert not self._left_behind, "an engine that ends in order removes its pool's file"
        self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._answers.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
        for path in self._left_behind:
            path.unlink()

    @property
    def _left_behind(self) -> list[Path]:
        """The pool's file, which an engine that is killed leaves where it is."""
        return list(Path("/dev/shm").glob(f"vllm_offload_{self._name}*"))

    @property
    def log_end(self) -> str:
        return self._log.read_text(errors="replace")[-6000:]

    def begin(self, tokens: list[int]) -> None:
        self._send({"tokens": tokens})

    def end(self) -> Answer:
        return Answer(**self._take(ANSWER_SECONDS))

    def ask(self, tokens: list[int]) -> Answer:
        self.begin(tokens)
        return self.end()

    def script(self, requests: list[dict[str, Any]]) -> list[tuple[float, list[str]]]:
        """What each step took, in seconds, and who got a token by it: see engine.stepped. `cached` is of these requests then."""
        self._send({"script": requests})
        answer = self._take(ANSWER_SECONDS)
        self.cached: dict[str, int] = answer["cached"]
        return [(seconds, names) for seconds, names in answer["steps"]]

    def set_pause(self, seconds: float) -> None:
        """How long this store's tier pauses in each step while work is under way."""
        self._send({"pause": seconds})
        assert self._take(ANSWER_SECONDS) == {"pause": seconds}

    def figures(self) -> dict[str, float]:
        """Sums over all labels, of the tier's own by their short names."""
        self._send({"figures": True})
        found = self._take(ANSWER_SECONDS)["figures"]
        return {name.removeprefix("vllm:kv_offload_").removeprefix("kvstore_"): found[name] for name in found}

    def _send(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()

    def _take(self, seconds: float) -> Any:
        ready, _, _ = select.select([self._answers], [], [], seconds)
        assert ready, f"no answer within {seconds:g} s:\n{self.log_end}"
        line = self._answers.readline()
        assert line, f"the engine has ended:\n{self.log_end}"
        return json.loads(line)
