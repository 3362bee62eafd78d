"""Workers and a gateway in this process, on real sockets: workers that break off when told to, and what a caller gets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import torch

from kvstore.clock import SystemClock
from kvstore.v1 import worker_pb2 as pb
from kvstore.v1 import worker_pb2_grpc
from kvstore_workers.model.model import Model
from kvstore_workers.runtime.address import open_channel
from kvstore_workers.runtime.dispatch import Limits, Pool
from kvstore_workers.runtime.engine import Engine
from kvstore_workers.runtime.gateway import GatewayServicer
from kvstore_workers.runtime.lane import Lane
from kvstore_workers.runtime.peer import Peer
from kvstore_workers.runtime.pool import Rule
from kvstore_workers.runtime.room import Room
from kvstore_workers.runtime.server import Server
from kvstore_workers.runtime.servicers import DecodeServicer, Desk, Identity, PrefillServicer, WorkerServicer
from tests.support.workers import tiny_model

SECONDS = 60.0
Event = pb.GenerateEvent
Asked = pb.DecodeRequest | pb.GenerateRequest


class Worker:
    """A prefill or decode worker without a store on the socket `path`. `after`: how its first calls end, each with a
    status after a number of events; later calls run through. `lie`: added to the tokens of all calls but the first."""

    def __init__(self, role: str, path: Path, *, model: Model | None = None, says: str = "") -> None:
        self.role = role
        self.path = path
        self.after: list[tuple[int, grpc.StatusCode]] = []
        self.calls: list[Asked] = []
        self.lie = 0
        self.engine = Engine(model or tiny_model(), store=None, writer=None, clock=SystemClock())
        self.room = Room(4, what="worker")
        self.lane = Lane()
        self.lane.call(lambda: torch.set_num_threads(1))
        self.server = Server(path, requests=4, name="--listen")
        desk = Desk(self.room, self.lane, SystemClock())
        if role == "prefill":
            worker_pb2_grpc.add_PrefillServicer_to_server(_Prefill(self, desk), self.server.grpc)
        else:
            worker_pb2_grpc.add_DecodeServicer_to_server(_Decode(self, desk), self.server.grpc)
        identity = Identity(says or role, "n", bit_equal=True)
        servicer = WorkerServicer(identity, self.engine, self.room)
        worker_pb2_grpc.add_WorkerServicer_to_server(servicer, self.server.grpc)

    @property
    def address(self) -> str:
        return f"unix:{self.path}"

    def start(self) -> None:
        self.server.start([])

    def stop(self) -> None:
        self.server.stop(seconds=1.0)
        self.lane.close()

    def watch(
        self, request: Asked, events: Iterator[Event], context: grpc.ServicerContext
    ) -> Iterator[Event]:
        self.calls.append(request)
        left, code = self.after.pop(0) if self.after else (1 << 30, grpc.StatusCode.OK)
        for event in events:
            if left == 0:
                context.abort(code, "broken by the test")
            left -= 1
            if event.kind == Event.TOKEN and len(self.calls) > 1:
                event.token += self.lie
            yield event


class _Prefill(PrefillServicer):
    def __init__(self, worker: Worker, desk: Desk) -> None:
        super().__init__(worker.engine, desk)
        self._worker = worker

    def Run(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[Event]:  # noqa: N802 -- gRPC's name
        return self._worker.watch(request, super().Run(request, context), context)


class _Decode(DecodeServicer):
    def __init__(self, worker: Worker, desk: Desk) -> None:
        super().__init__(worker.engine, desk)
        self._worker = worker

    def Run(self, request: pb.DecodeRequest, context: grpc.ServicerContext) -> Iterator[Event]:  # noqa: N802 -- gRPC's name
        return self._worker.watch(request, super().Run(request, context), context)


class Bench:
    """A gateway before `prefill` and `decode` workers, which are started unless they are named in `later`."""

    def __init__(
        self,
        folder: Path,
        stack: ExitStack,
        *,
        prefill: int = 1,
        decode: int = 1,
        requests: int = 8,
        per_worker: int = 4,
        limits: Limits | None = None,
        later: tuple[str, ...] = (),
        away_seconds: float = 2.0,
        models: dict[str, Model] | None = None,
        says: dict[str, str] | None = None,
    ) -> None:
        names = {
            role: [f"{role[0]}{place}" for place in range(count)] for role, count in _counts(prefill, decode)
        }
        self._stack = stack
        self.workers = {
            name: Worker(role, folder / name, model=(models or {}).get(name), says=(says or {}).get(name, ""))
            for role, group in names.items()
            for name in group
        }
        for name, worker in self.workers.items():
            if name not in later:
                self.start(worker)
        self.prefill, self.decode = [
            Pool(
                role,
                [
                    Peer(role, worker.address, stack.enter_context(open_channel(worker.path)))
                    for worker in self.workers.values()
                    if worker.role == role
                ],
                rule=Rule(per_worker=per_worker),
                limits=limits or Limits(),
                clock=SystemClock(),
            )
            for role in names
        ]
        self.room = Room(requests, what="gateway")
        server = Server(folder / "g", requests=requests, name="--listen")
        gateway = GatewayServicer(
            self.prefill, self.decode, room=self.room, clock=SystemClock(), away_seconds=away_seconds
        )
        worker_pb2_grpc.add_GatewayServicer_to_server(gateway, server.grpc)
        server.start([])
        stack.callback(server.stop, seconds=1.0)
        self.stub = worker_pb2_grpc.GatewayStub(stack.enter_context(open_channel(folder / "g")))

    def start(self, worker: Worker) -> None:
        worker.start()
        self._stack.callback(worker.stop)

    def stub_of(self, name: str) -> worker_pb2_grpc.DecodeStub:
        return worker_pb2_grpc.DecodeStub(self._stack.enter_context(open_channel(self.workers[name].path)))

    def call(self, prompt: list[int], new: int, **changes: object) -> Iterator[Event]:
        request = pb.GenerateRequest(tokens=prompt, max_new_tokens=new, return_logits=True, **changes)  # type: ignore[arg-type]
        call: Iterator[Event] = self.stub.Generate(request, timeout=SECONDS)
        return call

    def ask(self, prompt: list[int], new: int, **changes: object) -> list[Event]:
        return list(self.call(prompt, new, **changes))

    def wait_until_idle(self) -> None:
        """Until neither the gateway nor a worker has a request; asserts that no count is left behind."""
        assert self.room.wait_until_empty(seconds=SECONDS)
        for worker in self.workers.values():
            assert worker.room.wait_until_empty(seconds=SECONDS)
        assert sum(self.prefill.in_flight() + self.decode.in_flight()) == 0
        assert self.prefill.waiting() == self.decode.waiting() == 0


def _counts(prefill: int, decode: int) -> tuple[tuple[str, int], ...]:
    return ("prefill", prefill), ("decode", decode)


@contextmanager
def bench(**options: object) -> Iterator[Bench]:
    """Options as in Bench, on a short directory."""
    with TemporaryDirectory(prefix="kv-") as folder, ExitStack() as stack:
        yield Bench(Path(folder), stack, **options)  # type: ignore[arg-type]
