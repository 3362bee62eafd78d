"""Answers that grant something, and callers that have gone before the answer comes."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.service.status import Context


async def send_head(context: Context, *, undo: Callable[[], object]) -> None:
    """Send the answer's headers; where the caller is found to be gone, `undo` what it was granted.

    gRPC says nothing about an answer that was lost on its way. So this finds who left while the call waited or stood in
    a queue, at the price of one more message; who leaves while the answer is on its way keeps the grant to its deadline.
    """
    try:
        await context.send_initial_metadata(())
    except BaseException:
        undo()
        raise
