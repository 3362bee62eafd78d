"""Which window-state policy a log is served best with: what its states save against what keeping them costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvstore.simulate.case import Replay

HOURS_PER_MONTH = 730.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Assumed, to be replaced by the caller's: what a million tokens cost more computed than restored (list prices of
    V4.1-Flash in October 2026, 0.150 less 0.003), and a gigabyte of flash of one's own for a month."""

    usd_per_million_tokens: float = 0.147
    usd_per_gb_month: float = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """One window-state policy. `saved_rate` in percent of input tokens; bytes of states written per token of the blocks
    stored, and per token of input."""

    windows: str
    replay: Replay
    saved_rate: float
    state_bytes_per_token: float
    state_bytes_per_input_token: float = 0.0

    def worth(self, prices: Prices) -> float:
        """US dollars per million input tokens."""
        return self.saved_rate / 100 * prices.usd_per_million_tokens

    def cost(self, prices: Prices, kept_hours: float) -> float:
        """US dollars per million input tokens, each state kept once and for so long."""
        gigabytes = self.state_bytes_per_input_token * 1e6 / 1e9
        return gigabytes * kept_hours / HOURS_PER_MONTH * prices.usd_per_gb_month


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """`chosen` is worth most beyond its cost; `best` saves most; `zero` keeps no state and replays exactly. `where`: the policy,
    size and retention at which they were compared."""

    where: str
    prices: Prices
    kept_hours: float
    chosen: Weighed
    best: Weighed
    zero: Weighed
    block_bytes_per_token: float

    @property
    def even_usd_per_gb_month(self) -> float | None:
        """The price of storage below which `best` would be chosen over `chosen`; None where they are one or equally large."""
        more = self.best.state_bytes_per_input_token - self.chosen.state_bytes_per_input_token
        if more <= 0:
            return None
        months = self.kept_hours / HOURS_PER_MONTH
        gained = self.best.worth(self.prices) - self.chosen.worth(self.prices)
        return gained / (more * 1e6 / 1e9 * months)

    @property
    def line(self) -> str:
        chosen, best, zero, prices = self.chosen, self.best, self.zero, self.prices
        parts = [
            f"{_figures(chosen)} of states a token stored (blocks: {self.block_bytes_per_token:,.0f} B), worth "
            f"${chosen.worth(prices):.4f} for ${chosen.cost(prices, self.kept_hours):.4f} per million input tokens"
        ]
        if best.saved_rate == chosen.saved_rate:
            parts.append("none saves more")
        elif self.even_usd_per_gb_month is not None:
            parts.append(f"{_figures(best)}, pays below ${self.even_usd_per_gb_month:.4f} a GB-month")
        if (zero.windows, zero.replay) != (chosen.windows, chosen.replay):
            parts.append(f"zero with exact replays saves {zero.saved_rate:.2f} %")
        if chosen.replay is Replay.BOUNDED:
            parts.append("what follows a bounded replay is approximate")
        parts.append(
            f"prices assumed: ${prices.usd_per_million_tokens:g} a million tokens, ${prices.usd_per_gb_month:g} a GB-month, states "
            f"kept {self.kept_hours:.3g} h"
        )
        return "; ".join(parts)


def recommend(
    weighed: Sequence[Weighed],
    zero: Weighed,
    *,
    where: str,
    prices: Prices,
    kept_hours: float,
    block_bytes_per_token: float,
) -> Recommendation:
    """Of at least one policy, all weighed at the same place. Of equals the first given."""
    return Recommendation(
        where=where,
        prices=prices,
        kept_hours=kept_hours,
        chosen=max(weighed, key=lambda each: each.worth(prices) - each.cost(prices, kept_hours)),
        best=min(weighed, key=lambda each: (-each.saved_rate, each.state_bytes_per_token)),
        zero=zero,
        block_bytes_per_token=block_bytes_per_token,
    )


def recommendation_values(found: Recommendation) -> dict[str, Any]:
    """For JSON."""
    return {
        "windows": found.chosen.windows,
        "line": found.line,
        "where": found.where,
        "prices": asdict(found.prices),
        "kept_hours": found.kept_hours,
        "block_bytes_per_token": found.block_bytes_per_token,
        "saves_most_pays_below_usd_per_gb_month": found.even_usd_per_gb_month,
        "chosen": _values(found, found.chosen),
        "saves_most": _values(found, found.best),
        "zero_with_exact_replay": _values(found, found.zero),
    }


def _values(found: Recommendation, each: Weighed) -> dict[str, Any]:
    return {
        "windows": each.windows,
        "replay": each.replay.value,
        "tokens_saved_rate": each.saved_rate,
        "state_bytes_per_token": each.state_bytes_per_token,
        "worth_usd_per_million_input_tokens": each.worth(found.prices),
        "cost_usd_per_million_input_tokens": each.cost(found.prices, found.kept_hours),
    }


def _figures(each: Weighed) -> str:
    return f"{each.windows} saves {each.saved_rate:.2f} % of input tokens with {each.state_bytes_per_token:,.0f} B"
