"""`kvstore simulate`: a request log against the code that serves, without a service and without payloads."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvstore.cli import simulate_live
from kvstore.cli.output import add_json_flag, check_json_target, emit
from kvstore.cli.simulate_report import (
    Answer,
    check_pictures,
    sections_of,
    text,
    write_pictures,
)
from kvstore.cli.stopping import Check, stoppable
from kvstore.errors import InvalidArgument
from kvstore.policy.admission import Admission
from kvstore.policy.window import POLICY_NAMES
from kvstore.profile.registry import PROFILES, get_profile
from kvstore.service.process import collect_seldom
from kvstore.simulate.case import Replay, TtlFrom
from kvstore.simulate.formats import FORMATS, LoadedLog, load_log
from kvstore.simulate.log import OnBadLine
from kvstore.simulate.pictures.base import Section
from kvstore.simulate.recommend import Prices, recommendation_values
from kvstore.simulate.study import (
    DEFAULT_PROFILE,
    DEFAULT_SIZES,
    POLICIES,
    Question,
    Study,
    drive_years,
    facts,
    row_values,
)
from kvstore.units import parse_count, parse_size, parse_time

CASES_MAX = 1000
AUTO = "auto"


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "simulate",
        help="hit rates of a request log under policies, sizes, retentions and window states",
        description="Run a request log through the index, policies, plans and retention that serve, on the log's own clock and "
        "without payloads. A hit is what is held of a prompt's first blocks; the rate is over all input tokens, from an empty "
        "store. Blocks are those that the log names, a partly filled last one too.",
        epilog='A log is lines of JSON, as Mooncake publishes them: {"timestamp": 3000, "input_length": 1500, "output_length": 3, '
        '"hash_ids": [7, 8, 9]}; milliseconds, tokens, and a number for each block of 512 tokens, the same for the same prefix. '
        "--format has the others.",
    )
    parser.add_argument(
        "log", nargs="+", type=Path, metavar="LOG", help="one log, in one file or several, plain or gzip"
    )
    parser.add_argument(
        "--format", choices=list(FORMATS), help="how the log is written (default: told from its first lines)"
    )
    parser.add_argument("--block", metavar="N", help="tokens of one id in the log (default: the format's)")
    parser.add_argument("--group", metavar="K", default="1", help="ids that make one block (default 1)")
    parser.add_argument(
        "--policy",
        metavar="P,...",
        default="",
        help=f"what is evicted first: {', '.join(POLICIES)} (default lru)",
    )
    parser.add_argument(
        "--size",
        metavar="S,...",
        default="",
        help="how much is held: shares of all blocks of the log, bytes with --profile, or all "
        f"(default {','.join(DEFAULT_SIZES)}; all with --ttl and --windows)".replace("%", "%%"),
    )
    parser.add_argument("--ttl", metavar="T,...", default="", help="how long a block is kept, as in 5m,1h")
    parser.add_argument(
        "--ttl-from",
        choices=[each.value for each in TtlFrom],
        default=TtlFrom.USE.value,
        help="since when (default use)",
    )
    parser.add_argument(
        "--windows",
        metavar="W,...",
        default="",
        help=f"which window states are kept: {POLICY_NAMES} (default: all)",
    )
    parser.add_argument(
        "--replay",
        choices=[each.value for each in Replay],
        default=Replay.NONE.value,
        help="what a resume may rebuild, and pays for: none, a hit ends at a state (default none)",
    )
    parser.add_argument(
        "--admit",
        metavar="A,...",
        default=Admission.ALWAYS.value,
        help=f"which new blocks are written: {', '.join(Admission)} (what was asked for before; default always)",
    )
    parser.add_argument(
        "--endurance",
        metavar="SIZE",
        help="how much the drive may be written in its life, as in 14000TiB: tells its years at the log's pace",
    )
    parser.add_argument(
        "--segment",
        metavar="SIZE",
        help="simulate the disk too: segments of this size, or auto as the service chooses it, and its cleaner; tells what a device "
        "would be written (--endurance does so with auto)",
    )
    parser.add_argument(
        "--profile",
        choices=list(PROFILES),
        help=f"the model, for sizes in bytes, states and replays (default for states and replays {DEFAULT_PROFILE})",
    )
    parser.add_argument(
        "--as-served",
        action="store_true",
        help="the service's own rule: whole blocks, and one token at least is computed",
    )
    parser.add_argument(
        "--on-bad-line",
        choices=[each.value for each in OnBadLine],
        default=OnBadLine.STOP.value,
        help="stop at a line that cannot be used, or skip and count it (default stop)",
    )
    for name, default, what in (
        ("tokens", Prices().usd_per_million_tokens, "a million tokens computed rather than restored"),
        ("storage", Prices().usd_per_gb_month, "a GB kept for a month"),
    ):
        parser.add_argument(
            f"--usd-{name}",
            metavar="USD",
            type=float,
            default=default,
            help=f"what {what} costs, for the recommendation of window states (assumed: {default:g})",
        )
    parser.add_argument("--html", metavar="FILE", help="pictures and their numbers, as one page")
    parser.add_argument(
        "--png",
        metavar="PATH",
        help="the pictures as images: x.png, one with all of them, or a folder, one each (needs kvstore[pictures])",
    )
    simulate_live.add_flags(parser)
    add_json_flag(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    check_json_target(args)
    simulate_live.check(args)
    if args.live is not None:
        return simulate_live.run(args, lambda: _loaded(args))
    # Nobody waits for its next step, and hardly any of its objects are part of a cycle.
    collect_seldom(young=50_000)
    check_pictures(args.html, args.png)
    question = Question(
        policies=_list(args.policy, "--policy"),
        sizes=_list(args.size, "--size"),
        windows=_list(args.windows, "--windows"),
        ttl=[(text, _ttl(text)) for text in _list(args.ttl, "--ttl")],
        ttl_from=TtlFrom(args.ttl_from),
        replay=Replay(args.replay),
        as_served=args.as_served,
        admissions=[_admission(text) for text in _list(args.admit, "--admit")],
        weighs_writes=args.endurance is not None or args.segment is not None,
        segment_bytes=_segment(args.segment),
        prices=Prices(
            usd_per_million_tokens=_price(args.usd_tokens, "--usd-tokens"),
            usd_per_gb_month=_price(args.usd_storage, "--usd-storage"),
        ),
    )
    endurance = _endurance(args.endurance)
    profile = get_profile(args.profile) if args.profile else None
    loaded = _loaded(args)
    study = Study(loaded, question, profile)
    if question.weighs_writes and study.profile is None:
        option = "--segment" if args.endurance is None else "--endurance"
        raise InvalidArgument(
            "what is written has no weight without a model",
            field=option,
            value=args.segment if args.endurance is None else args.endurance,
            allowed=f"with --profile, one whose blocks fit those of the log, {loaded.log.block_tokens} tokens",
        )
    if len(study.cases) > CASES_MAX:
        raise InvalidArgument(
            "too many cases at once", field="cases", value=len(study.cases), allowed=f"{CASES_MAX}"
        )

    def work(check: Check) -> tuple[Answer, list[Section]]:
        rows = [
            {**values, "drive_years": drive_years(values["device_bytes_per_day"], endurance)}
            for values in (row_values(row, study) for row in study.rows(check))
        ]
        advice = study.recommendation(check)
        answer: Answer = {
            "log": facts(study),
            "rows": rows,
            "recommendation": None if advice is None else recommendation_values(advice),
        }
        wants_pictures = args.html is not None or args.png is not None
        return answer, sections_of(study, answer, check) if wants_pictures else []

    answer, drawn = stoppable(work, leaves="nothing")
    write_pictures(drawn, answer, logs=args.log, words=args.words, html=args.html, png_path=args.png)
    emit(args, answer, text(answer))
    return 0


def _loaded(args: argparse.Namespace) -> LoadedLog:
    return load_log(
        args.log,
        format_name=args.format,
        id_tokens=None if args.block is None else parse_count(args.block, name="--block"),
        group=parse_count(args.group, name="--group"),
        on_bad_line=OnBadLine(args.on_bad_line),
    )


def _list(text: str, option: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(parts):
        raise InvalidArgument(
            "an empty name in a list", field=option, value=text, allowed="names with commas between them"
        )
    return parts


def _endurance(text: str | None) -> int | None:
    if text is None:
        return None
    size = parse_size(text, name="--endurance")
    if not size:
        raise InvalidArgument("nothing may be written", field="--endurance", value=text, allowed="1B or more")
    return size


def _segment(text: str | None) -> int | None:
    return None if text in (None, AUTO) else parse_size(text, name="--segment")


def _admission(text: str) -> Admission:
    try:
        return Admission(text)
    except ValueError as error:
        known = ", ".join(Admission)
        raise InvalidArgument("unknown admission", field="--admit", value=text, allowed=known) from error


def _price(value: float, option: str) -> float:
    if not 0 <= value <= 1e9:
        raise InvalidArgument("not a price", field=option, value=value, allowed="0 to 1e9 US dollars")
    return value


def _ttl(text: str) -> float:
    seconds = parse_time(text, name="--ttl")
    if not 0 < seconds <= 1e9:
        raise InvalidArgument(
            "not a retention", field="--ttl", value=text, allowed="more than 0, up to 1e9 s"
        )
    return seconds
