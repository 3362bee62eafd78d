"""Window-state policies: which states a worker keeps, in which tier, and whether they fit the disk's share for states."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kvstore.errors import InvalidArgument, PolicyTooLarge
from kvstore.profile.base import Profile


class WindowKind(StrEnum):
    """ZERO keeps nothing on SSD; ENDPOINTS_ONLY the last usable edge of the prompt and the last edge of the output;
    ENDPOINTS those and the edges where a prompt leaves what was held before it (branch points); PERIODIC a state at every
    multiple of N tokens; ENDPOINTS_PERIODIC what ENDPOINTS and PERIODIC keep; FULL the window rows of every token, from
    which a resume at any edge replays the last CSA group; FULL_OVERLAP the overlap at each block's end too, so that
    nothing is replayed."""

    ZERO = "zero"
    ENDPOINTS_ONLY = "endpoints-only"
    ENDPOINTS = "endpoints"
    PERIODIC = "periodic"
    ENDPOINTS_PERIODIC = "endpoints+periodic"
    FULL = "full"
    FULL_OVERLAP = "full+overlap"


DEFAULT_POLICY = "endpoints"
POLICY_NAMES = "zero, endpoints-only, endpoints, periodic:N, endpoints+periodic:N, full, full+overlap"

_PERIODIC = (WindowKind.PERIODIC, WindowKind.ENDPOINTS_PERIODIC)
_AT_ENDPOINTS = (WindowKind.ENDPOINTS_ONLY, WindowKind.ENDPOINTS, WindowKind.ENDPOINTS_PERIODIC)

ENDPOINT_STATES = 3
"""States that one prompt keeps under `endpoints` at most: its last usable edge, its output's last edge, one branch point."""

_END_STATES = {
    WindowKind.ENDPOINTS_ONLY: ENDPOINT_STATES - 1,
    WindowKind.ENDPOINTS: ENDPOINT_STATES,
    WindowKind.ENDPOINTS_PERIODIC: ENDPOINT_STATES,
}


@dataclass(frozen=True, slots=True)
class WindowPolicy:
    """`every_tokens` is N for PERIODIC and ENDPOINTS_PERIODIC, else 0. `str()` gives the text that `parse` reads."""

    kind: WindowKind
    every_tokens: int = 0
    # What follows from the kind; every plan asks for it.
    output_edge_on_ssd: bool = field(init=False, compare=False, repr=False)
    """Whether the last edge of the output goes to SSD."""
    rows: bool = field(init=False, compare=False, repr=False)
    """Whether the window rows of every token go to SSD."""
    rows_overlap: bool = field(init=False, compare=False, repr=False)
    """Whether the overlap at each block's end goes with the rows."""

    def __post_init__(self) -> None:
        kind, put = self.kind, object.__setattr__
        put(self, "output_edge_on_ssd", kind in _AT_ENDPOINTS)
        put(self, "rows", kind in (WindowKind.FULL, WindowKind.FULL_OVERLAP))
        put(self, "rows_overlap", kind is WindowKind.FULL_OVERLAP)

    @classmethod
    def parse(cls, text: str, profile: Profile) -> WindowPolicy:
        """Raises InvalidArgument for anything but the policies in POLICY_NAMES, N a multiple of a block."""
        return cls._parse(text, profile.block_tokens)

    @classmethod
    def check(cls, text: str, *, field: str = "policy") -> None:
        """Raise InvalidArgument, about `field`, for a text that is no policy of any profile."""
        cls._parse(text, 1, field=field)

    @classmethod
    def _parse(cls, text: str, unit: int, *, field: str = "policy") -> WindowPolicy:
        if text in tuple(WindowKind) and text not in _PERIODIC:
            return cls(WindowKind(text))
        name, colon, number = text.partition(":")
        if name in _PERIODIC and colon and number.isascii() and number.isdecimal() and len(number) <= 12:
            every = int(number)
            # One way to write each policy, so that equal policies are equal texts.
            if every > 0 and every % unit == 0 and str(every) == number:
                return cls(WindowKind(name), every)
        block = f"a positive multiple of {unit}" if unit > 1 else "a positive multiple of the profile's block"
        raise InvalidArgument(
            "unknown window-state policy",
            field=field,
            value=text,
            allowed=f"{POLICY_NAMES}, with N {block}",
        )

    def __str__(self) -> str:
        return f"{self.kind.value}:{self.every_tokens}" if self.every_tokens else self.kind.value

    def item_bytes(self, profile: Profile) -> int:
        """Bytes of each item that is kept beside the blocks: a state, or the window rows of a block."""
        return _rows_bytes(self, profile) if self.rows else profile.state_bytes

    def pool_edges(
        self, profile: Profile, *, prompt_tokens: int, after: int, branch_at: int = 0
    ) -> tuple[int, ...]:
        """Edges > `after` inside the prompt whose state goes to the pool, ascending: under every policy the last usable
        one and the branch point, if there is one (0: none)."""
        last = last_usable_edge(profile, prompt_tokens)
        if not branch_at and after >= 0:
            return (last,) if last > after else ()
        edges = {branch_at, last}
        return tuple(sorted(edge for edge in edges if edge > after))

    def ssd_edges(
        self, profile: Profile, *, prompt_tokens: int, after: int, branch_at: int = 0
    ) -> tuple[int, ...]:
        """Edges > `after` inside the prompt whose state goes to SSD, ascending."""
        if self.kind is WindowKind.ENDPOINTS:
            return self.pool_edges(profile, prompt_tokens=prompt_tokens, after=after, branch_at=branch_at)
        edges: set[int] = set()
        if self.kind in _AT_ENDPOINTS:
            branch = 0 if self.kind is WindowKind.ENDPOINTS_ONLY else branch_at
            edges.update(self.pool_edges(profile, prompt_tokens=prompt_tokens, after=after, branch_at=branch))
        if self.kind in _PERIODIC:
            first = (after // self.every_tokens + 1) * self.every_tokens
            edges.update(range(first, prompt_tokens + 1, self.every_tokens))
        return tuple(sorted(edges))


def last_usable_edge(profile: Profile, prompt_tokens: int) -> int:
    """The last block edge that a prompt of n tokens can resume at: at least one token is left to compute.

    0 when there is none (n <= block_tokens).
    """
    size = profile.block_tokens
    return (prompt_tokens - 1) // size * size if prompt_tokens > 0 else 0


# ---- the disk's share for states -------------------------------------------------------------------------------


def prompt_states_bytes(policy: WindowPolicy, profile: Profile, prompt_tokens: int) -> int:
    """Bytes of states and rows that one prompt keeps on SSD at most, once all of it is stored."""
    match policy.kind:
        case WindowKind.ZERO:
            return 0
        case WindowKind.ENDPOINTS | WindowKind.ENDPOINTS_ONLY:
            return _END_STATES[policy.kind] * profile.state_bytes
        case WindowKind.PERIODIC:
            return prompt_tokens // policy.every_tokens * profile.state_bytes
        case WindowKind.ENDPOINTS_PERIODIC:
            return (ENDPOINT_STATES + prompt_tokens // policy.every_tokens) * profile.state_bytes
        case WindowKind.FULL | WindowKind.FULL_OVERLAP:
            return prompt_tokens // profile.block_tokens * _rows_bytes(policy, profile)


def share_tokens(policy: WindowPolicy, profile: Profile, *, share_bytes: int, longest_tokens: int) -> int:
    """Of how many tokens a share of `share_bytes` holds the states; 0 where the policy keeps none. Where ends are kept, a
    prompt counts as one of `longest_tokens`, the most that the service takes."""
    match policy.kind:
        case WindowKind.ZERO:
            return 0
        case WindowKind.ENDPOINTS | WindowKind.ENDPOINTS_ONLY:
            return share_bytes // (_END_STATES[policy.kind] * profile.state_bytes) * longest_tokens
        case WindowKind.ENDPOINTS_PERIODIC:
            each = prompt_states_bytes(policy, profile, longest_tokens)
            return share_bytes // each * longest_tokens
        case WindowKind.PERIODIC:
            return share_bytes // profile.state_bytes * policy.every_tokens
        case WindowKind.FULL | WindowKind.FULL_OVERLAP:
            return share_bytes // _rows_bytes(policy, profile) * profile.block_tokens


def check_share(policy: WindowPolicy, profile: Profile, *, share_bytes: int, longest_tokens: int) -> None:
    """Raise PolicyTooLarge, with the arithmetic, where the states of one prompt of `longest_tokens` tokens do not fit a
    share of `share_bytes`."""
    needed = prompt_states_bytes(policy, profile, longest_tokens)
    if needed <= share_bytes:
        return
    held = share_tokens(policy, profile, share_bytes=share_bytes, longest_tokens=longest_tokens)
    raise PolicyTooLarge(
        f"the states of one prompt do not fit the disk's share for states: {_sum(policy, profile, longest_tokens)} = "
        f"{needed:,} B; the share is {share_bytes:,} B and holds the states of {held:,} tokens",
        field="policy",
        value=policy,
        allowed=f"{_fitting(profile, share_bytes, longest_tokens)}; or a larger `disk` or `states_share`, or a smaller "
        "`prompt_tokens`",
    )


def _rows_bytes(policy: WindowPolicy, profile: Profile) -> int:
    return profile.rows_overlap_block_bytes if policy.rows_overlap else profile.rows_block_bytes


def _sum(policy: WindowPolicy, profile: Profile, tokens: int) -> str:
    """The product that `prompt_states_bytes` works out, in words."""
    if policy.kind in (WindowKind.ENDPOINTS, WindowKind.ENDPOINTS_ONLY):
        return f"{_END_STATES[policy.kind]} states of {profile.state_bytes:,} B"
    if policy.kind is WindowKind.ENDPOINTS_PERIODIC:
        count = ENDPOINT_STATES + tokens // policy.every_tokens
        return (
            f"{ENDPOINT_STATES} states and {tokens:,} tokens / {policy.every_tokens:,}, {count:,} states of "
            f"{profile.state_bytes:,} B"
        )
    if policy.kind is WindowKind.PERIODIC:
        count = tokens // policy.every_tokens
        return f"{tokens:,} tokens / {policy.every_tokens:,} = {count:,} states of {profile.state_bytes:,} B"
    size = profile.block_tokens
    count = tokens // size
    return f"{tokens:,} tokens / {size} = {count:,} blocks with {_rows_bytes(policy, profile):,} B of window rows"


def _fitting(profile: Profile, share_bytes: int, longest_tokens: int) -> str:
    """Policies that the share has room for."""
    fits = ["zero"]
    if ENDPOINT_STATES * profile.state_bytes <= share_bytes:
        fits.append("endpoints")
    states = share_bytes // profile.state_bytes
    if states:
        # The smallest N with longest // N <= states.
        least = longest_tokens // (states + 1) + 1
        unit = profile.block_tokens
        fits.append(f"periodic:N with N >= {-(-least // unit) * unit}")
    for kind in (WindowKind.FULL, WindowKind.FULL_OVERLAP):
        if prompt_states_bytes(WindowPolicy(kind), profile, longest_tokens) <= share_bytes:
            fits.append(kind.value)
    return ", ".join(fits)
