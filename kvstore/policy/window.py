"""Window-state policies: which states a worker keeps, and in which tier."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvstore.errors import InvalidArgument
from kvstore.profile.base import Profile


class WindowKind(StrEnum):
    """ZERO keeps nothing on SSD; ENDPOINTS the last usable edge of the prompt and the last edge of the output;
    PERIODIC a state at every multiple of N tokens."""

    ZERO = "zero"
    ENDPOINTS = "endpoints"
    PERIODIC = "periodic"


DEFAULT_POLICY = "endpoints"


@dataclass(frozen=True, slots=True)
class WindowPolicy:
    """`every_tokens` is N for PERIODIC, else 0. `str()` gives the text that `parse` reads."""

    kind: WindowKind
    every_tokens: int = 0

    @classmethod
    def parse(cls, text: str, profile: Profile) -> WindowPolicy:
        """Raises InvalidArgument for anything but `zero`, `endpoints` and `periodic:N`, N a multiple of a block."""
        return cls._parse(text, profile.block_tokens)

    @classmethod
    def check(cls, text: str) -> None:
        """Raise InvalidArgument for a text that is no policy of any profile."""
        cls._parse(text, 1)

    @classmethod
    def _parse(cls, text: str, unit: int) -> WindowPolicy:
        if text in ("zero", "endpoints"):
            return cls(WindowKind(text))
        name, colon, number = text.partition(":")
        if name == "periodic" and colon and number.isascii() and number.isdecimal() and len(number) <= 12:
            every = int(number)
            # One way to write each policy, so that equal policies are equal texts.
            if every > 0 and every % unit == 0 and str(every) == number:
                return cls(WindowKind.PERIODIC, every)
        block = f"a positive multiple of {unit}" if unit > 1 else "a positive multiple of the profile's block"
        raise InvalidArgument(
            "unknown window-state policy",
            field="policy",
            value=text,
            allowed=f"zero, endpoints, periodic:N with N {block}",
        )

    def __str__(self) -> str:
        return f"periodic:{self.every_tokens}" if self.kind is WindowKind.PERIODIC else self.kind.value

    @property
    def output_edge_on_ssd(self) -> bool:
        """Whether the last edge of the output goes to SSD."""
        return self.kind is WindowKind.ENDPOINTS

    def pool_edges(self, profile: Profile, *, prompt_tokens: int, after: int) -> tuple[int, ...]:
        """Edges > `after` inside the prompt whose state goes to the pool: under every policy the last usable one."""
        edge = last_usable_edge(profile, prompt_tokens)
        return (edge,) if edge > after else ()

    def ssd_edges(self, profile: Profile, *, prompt_tokens: int, after: int) -> tuple[int, ...]:
        """Edges > `after` inside the prompt whose state goes to SSD, ascending."""
        if self.kind is WindowKind.ENDPOINTS:
            return self.pool_edges(profile, prompt_tokens=prompt_tokens, after=after)
        if self.kind is WindowKind.PERIODIC:
            first = (after // self.every_tokens + 1) * self.every_tokens
            return tuple(range(first, prompt_tokens + 1, self.every_tokens))
        return ()


def last_usable_edge(profile: Profile, prompt_tokens: int) -> int:
    """The last block edge that a prompt of n tokens can resume at: at least one token is left to compute.

    0 when there is none (n <= block_tokens).
    """
    return max(prompt_tokens - 1, 0) // profile.block_tokens * profile.block_tokens
