"""How a call's bytes become a request: for each call of a service of the contract, a handler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError

from kvstore.v1 import cache_pb2

FINISHED = frozenset({"Fetch"})
"""They answer with frames that are finished: see `wire_frame`."""

_KINDS = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


@dataclass(frozen=True, slots=True)
class Unreadable:
    """In the place of a request that is no message of its call."""

    why: str


Around = Callable[[str, Any], Any]
"""From a call's name and its method, another method in its place."""


def handlers(service: str, servicer: object, *, around: Around) -> dict[str, Any]:
    """For all calls of the contract's `service`, by name. A single request that cannot be read reaches its method as
    Unreadable, so that the answer is the service's own; a frame of a stream raises DecodeError where it is read."""
    described = cache_pb2.DESCRIPTOR.services_by_name[service]
    return {
        method.name: _handler(method, around(method.name, getattr(servicer, method.name)))
        for method in described.methods
    }


def _handler(method: MethodDescriptor, answer_call: Any) -> Any:
    parse = getattr(cache_pb2, method.input_type.name).FromString
    answer = getattr(cache_pb2, method.output_type.name)
    return _KINDS[method.client_streaming, method.server_streaming](
        answer_call,
        request_deserializer=parse if method.client_streaming else _readable(parse),
        response_serializer=None if method.name in FINISHED else answer.SerializeToString,
    )


def _readable(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError as error:
            return Unreadable(str(error))

    return read
