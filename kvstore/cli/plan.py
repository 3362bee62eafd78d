"""`kvstore plan`: one lookup explained in words and numbers. Nothing is leased and nothing changes."""

from __future__ import annotations

import argparse
from dataclasses import asdict, fields

from kvstore.cli.connect import add_directory_flag, connect, named
from kvstore.cli.output import add_json_flag, check_json_target, emit
from kvstore.cli.plan_report import Explained, as_json, as_text
from kvstore.cli.prompt import Prompt, parse_keys, parse_tokens, prompt_of_tokens, read_text
from kvstore.errors import ConfigError
from kvstore.plan.base import Alternative, Costs, Coverage, SaveStates
from kvstore.plan.explain import policies_to_compare, what_if
from kvstore.plan.planner import ways
from kvstore.policy.window import WindowPolicy
from kvstore.profile.base import Profile
from kvstore.profile.keyed import profile_of
from kvstore.types import Exactness
from kvstore.units import parse_count
from kvstore_client.values import Alternative as ClientAlternative
from kvstore_client.values import OpenedNamespace

_BY_DEFAULT = "exact, but for models trained for a bounded replay"


TOKENS_MAX = 1 << 22
"""Of a prompt that is asked about: its keys fit one call whatever the block."""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="how a prompt would be resumed, what each way costs, and why",
        description="Look one prompt up and explain the plan: what is held, the price of each way to resume, the way that is "
        "chosen and the runner-up, which states would be saved, and what other window-state policies would keep. It is a "
        "probe: nothing is leased, read or saved.",
    )
    add_directory_flag(parser)
    parser.add_argument("--namespace", required=True, metavar="NAME", help="the namespace to look in")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--tokens",
        metavar="FILE",
        help='the prompt\'s token ids (- reads stdin): a JSON list, a JSON object with "tokens", or numbers',
    )
    what.add_argument(
        "--keys", metavar="FILE", help="the keys of the prompt's whole blocks in hex (- reads stdin)"
    )
    parser.add_argument("--prompt-tokens", metavar="N", help="with --keys: how many tokens the prompt has")
    parser.add_argument(
        "--what-if",
        nargs="?",
        const="",
        metavar="N",
        help="also show how a next turn of N more tokens (default: one block) would resume under each window-state policy",
    )
    parser.add_argument(
        "--exactness",
        choices=[each.value.lower() for each in Exactness],
        help=f"whether approximate bytes and a bounded replay will do (default: {_BY_DEFAULT})",
    )
    add_json_flag(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    check_json_target(args)
    asked = Exactness(args.exactness.upper()) if args.exactness else None
    with connect(args) as client:
        namespace = named(client, args.namespace)
        prompt = _prompt(args, namespace)
        found = client.lookup(
            namespace.digest, prompt.keys, prompt_tokens=prompt.tokens, lease=False, exactness=asked
        )
    profile = profile_of(namespace.profile_name, namespace.geometry)
    policy = WindowPolicy.parse(namespace.policy, profile)
    coverage = Coverage(**asdict(found.coverage))
    costs = Costs(**{field.name: getattr(found.costs, field.name) for field in fields(Costs)})
    exact_only = not profile.bounded_is_trained if asked is None else asked is Exactness.EXACT
    next_tokens = _next_tokens(args, profile)
    explained = Explained(
        namespace=namespace.name,
        profile=profile,
        policy=policy,
        prompt_tokens=prompt.tokens,
        blocks_held=found.blocks_held,
        blocks_in_flight=found.blocks_in_flight,
        in_flight_seconds=found.in_flight_seconds,
        coverage=coverage,
        costs=costs,
        exactness=found.plan.exactness,
        chosen=_way(found.plan.chosen),
        runner_up=_way(found.plan.runner_up) if found.plan.runner_up else None,
        ways=ways(profile, coverage, prompt_tokens=prompt.tokens, costs=costs, exact_only=exact_only),
        save_states=SaveStates(**asdict(found.plan.save_states)),
        next_tokens=next_tokens,
        outlooks=what_if(
            profile,
            policies_to_compare(profile, policy),
            prompt_tokens=prompt.tokens,
            next_tokens=next_tokens or profile.block_tokens,
            costs=costs,
            exact_only=exact_only,
        ),
    )
    emit(args, as_json(explained), as_text(explained))
    return 0


def _prompt(args: argparse.Namespace, namespace: OpenedNamespace) -> Prompt:
    if args.tokens is not None:
        if args.prompt_tokens is not None:
            raise ConfigError(
                "the tokens say how many they are",
                field="--prompt-tokens",
                value=args.prompt_tokens,
                allowed="only with --keys",
            )
        tokens = parse_tokens(read_text(args.tokens, option="--tokens"))
        _check_length(len(tokens), option="--tokens")
        return prompt_of_tokens(tokens, root=namespace.digest, block_tokens=namespace.block_tokens)
    if args.prompt_tokens is None:
        raise ConfigError(
            "keys do not say how long the prompt is",
            field="--prompt-tokens",
            value="",
            allowed="a whole number, with --keys",
        )
    keys = parse_keys(read_text(args.keys, option="--keys"))
    count = parse_count(args.prompt_tokens, name="--prompt-tokens")
    _check_length(count, option="--prompt-tokens")
    return Prompt(keys, count)


def _check_length(tokens: int, *, option: str) -> None:
    if tokens > TOKENS_MAX:
        raise ConfigError(
            "the prompt is too long", field=option, value=tokens, allowed=f"{TOKENS_MAX} tokens"
        )


def _next_tokens(args: argparse.Namespace, profile: Profile) -> int:
    """How many tokens the next turn adds; 0 where nobody asked."""
    if args.what_if is None:
        return 0
    if args.what_if == "":
        return profile.block_tokens
    count = parse_count(args.what_if, name="--what-if")
    if not 1 <= count <= TOKENS_MAX:
        raise ConfigError(
            "a turn adds tokens", field="--what-if", value=args.what_if, allowed=f"1 to {TOKENS_MAX}"
        )
    return count


def _way(way: ClientAlternative) -> Alternative:
    return Alternative(**asdict(way))
