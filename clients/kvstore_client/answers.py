"""What a lookup answers, beside what it grants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvstore.v1 import cache_pb2 as pb
from kvstore_client.messages import from_costs, from_coverage, from_plan
from kvstore_client.values import Costs, Coverage, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupAnswer:
    """`blocks_held`: blocks held without a gap from the start, whether or not the plan uses them. `blocks_in_flight`: blocks
    right after those that others are computing, the first of them since `in_flight_seconds`. `waited_seconds`: how long the
    call waited for others. `costs` are the rates that the plan was priced with."""

    plan: Plan
    blocks_held: int
    blocks_in_flight: int
    in_flight_seconds: float
    waited_seconds: float
    coverage: Coverage
    costs: Costs


def answer_fields(reply: pb.LookupReply) -> dict[str, Any]:
    """The fields of a LookupAnswer. KvstoreError for a plan that breaks its own laws."""
    return {
        "plan": from_plan(reply.plan),
        "blocks_held": reply.blocks_held,
        "blocks_in_flight": reply.blocks_in_flight,
        "in_flight_seconds": reply.in_flight_seconds,
        "waited_seconds": reply.waited_seconds,
        "coverage": from_coverage(reply.coverage),
        "costs": from_costs(reply.costs),
    }
