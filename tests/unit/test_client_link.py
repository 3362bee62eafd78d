"""How the client reaches a service, takes its errors, and keeps away from one that does not answer."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from kvstore.clock import ManualClock
from kvstore.errors import (
    ALL_ERRORS,
    DamagedBytes,
    InvalidArgument,
    KvstoreError,
    LimitExceeded,
    Unavailable,
    UnknownLease,
    UnknownReservation,
    UnknownSession,
)
from kvstore.types import ItemKind
from kvstore.v1 import cache_pb2 as pb
from kvstore_client import CacheClient, Costs, Deadlines, ReserveItem
from kvstore_client.breaker import Breaker
from kvstore_client.hello import Hello, check_hello
from tests.support.double import BOOT, hello, no_plan, refuse, service_double
from tests.support.service import short_directory

NAMESPACE = b"n" * 32
QUICK = Deadlines(connect=0.5, lookup=1.0, probe=0.2)


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_directory() as directory:
        directory.mkdir()
        yield directory


def probe_lookup(client: CacheClient) -> None:
    client.lookup(NAMESPACE, [], prompt_tokens=0, lease=False)


def answering_lookups() -> dict[str, object]:
    return {"Lookup": lambda request, context: no_plan(request.prompt_tokens)}


# ---- breaker ------------------------------------------------------------------------------------------------


def test_pauses_double_up_to_the_longest_and_start_again_after_success() -> None:
    breaker = Breaker(0.05, 0.2)
    assert breaker.is_closed
    now = 100.0
    for pause in (0.05, 0.1, 0.2, 0.2):
        breaker = breaker.failed(now)
        assert not breaker.is_closed
        assert breaker.seconds_left(now) == pytest.approx(pause)
        now += pause
        assert breaker.seconds_left(now + 1e-9) == 0.0
        now += 1e-6
    assert breaker.succeeded().is_closed
    assert breaker.succeeded().failed(now).seconds_left(now) == pytest.approx(0.05)


def test_failures_beside_each_other_count_once() -> None:
    once = Breaker(0.05, 0.2).failed(100.0)
    assert once.failed(100.01) is once
    assert once.failed(100.06).failures == 2


def test_a_breaker_without_pause_never_refuses() -> None:
    assert Breaker(0.0, 0.0).failed(100.0).is_closed


@pytest.mark.parametrize("failures", [2, 100, 10_000])
def test_a_long_absence_does_not_overflow(failures: int) -> None:
    assert Breaker(0.05, 0.2, failures, 0.0).failed(5.0).until == pytest.approx(5.2)


# ---- construction -------------------------------------------------------------------------------------------


def test_constructing_touches_nothing(tmp_path: Path) -> None:
    before = threading.active_count()
    with CacheClient(tmp_path / "not" / "there", owner="t") as client:
        assert client.boot is None
        assert "not/there" in repr(client)
    assert threading.active_count() == before


@pytest.mark.parametrize("owner", ["", "x" * 129, "näme", "a\nb"])
def test_a_bad_owner_is_refused_by_name(owner: str) -> None:
    with pytest.raises(InvalidArgument, match="owner"):
        CacheClient("d", owner=owner)


def test_a_path_too_long_for_a_socket_is_refused_with_what_to_do() -> None:
    with pytest.raises(InvalidArgument, match=r"shorter path.*107"):
        CacheClient("/" + "d" * 120, owner="t")


@pytest.mark.parametrize("field", ["connect", "lookup", "fetch", "commit", "release", "pause_first"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_bad_deadline_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(InvalidArgument, match=field):
        Deadlines(**{field: value})


# ---- a service that is not there ----------------------------------------------------------------------------


def test_without_a_service_each_call_fails_fast_as_unavailable(folder: Path) -> None:
    with CacheClient(folder, owner="t", deadlines=Deadlines(pause_first=0, pause_most=0)) as client:
        calls = [
            lambda: probe_lookup(client),
            client.stats,
            client.namespaces,
            client.clear,
            lambda: client.drain(5),
            lambda: client.take_handoff(NAMESPACE, bytes(16)),
            lambda: client.reserve(NAMESPACE, []),
            lambda: client.put_handoff(NAMESPACE, position=1, payload=b"x"),
            lambda: client.set_policy(NAMESPACE, "zero"),
        ]
        for call in calls:
            start = time.monotonic()
            with pytest.raises(Unavailable, match="kvstore serve"):
                call()
            assert time.monotonic() - start < 1.0


def test_the_breaker_refuses_for_the_pause_and_then_looks_again(folder: Path) -> None:
    clock = ManualClock()
    with CacheClient(folder, owner="t", clock=clock) as client:
        with pytest.raises(Unavailable, match="kvstore serve"):
            probe_lookup(client)
        with pytest.raises(Unavailable, match="calls again in 50 ms"):
            probe_lookup(client)
        clock.advance(0.049)
        with pytest.raises(Unavailable, match="calls again"):
            probe_lookup(client)
        clock.advance(0.002)
        with pytest.raises(Unavailable, match="kvstore serve"):
            probe_lookup(client)
        with service_double(folder, answers=answering_lookups()):
            with pytest.raises(Unavailable, match="calls again in 100 ms"):
                probe_lookup(client)
            clock.advance(0.101)
            probe_lookup(client)
            assert client.boot == BOOT


def test_a_service_that_accepts_but_never_speaks_costs_the_connect_deadline_once(folder: Path) -> None:
    deadlines = Deadlines(connect=0.3, probe=0.05)
    with (
        service_double(folder, greet=lambda number: None),
        CacheClient(folder, owner="t", deadlines=deadlines) as client,
    ):
        start = time.monotonic()
        with pytest.raises(Unavailable, match="no session"):
            probe_lookup(client)
        assert 0.25 < time.monotonic() - start < 3.0
        # From here on a look at the socket decides, with its own short deadline.
        slowest = 0.0
        for _ in range(20):
            start = time.monotonic()
            with pytest.raises(Unavailable):
                probe_lookup(client)
            slowest = max(slowest, time.monotonic() - start)
        assert slowest < 2.0


def test_callers_that_wait_for_a_failing_connection_fail_with_it(folder: Path) -> None:
    deadlines = Deadlines(connect=0.3)
    with (
        service_double(folder, greet=lambda number: None),
        CacheClient(folder, owner="t", deadlines=deadlines) as client,
    ):
        errors: list[BaseException] = []

        def call() -> None:
            try:
                probe_lookup(client)
            except Unavailable as error:
                errors.append(error)

        threads = [threading.Thread(target=call) for _ in range(8)]
        start = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(errors) == 8
        assert time.monotonic() - start < 2.0


# ---- the hello ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"hello\n",
        b"[]\n",
        b"null\n",
        b"{}\n",
        b"[" * 3000 + b"\n",
        b"x" * 5000,
        b'{"protocol": 2, "session": "' + b"0" * 32 + b'", "boot": "' + b"0" * 32 + b'"}\n',
        b'{"protocol": 1, "session": "' + b"0" * 31 + b'", "boot": "' + b"0" * 32 + b'"}\n',
        b'{"protocol": 1, "session": "' + b"G" * 32 + b'", "boot": "' + b"0" * 32 + b'"}\n',
        b'{"protocol": 1, "session": 7, "boot": null}\n',
        b'{"protocol": 2, "newest": 3, "session": "' + b"0" * 32 + b'", "boot": "' + b"0" * 32 + b'"}\n',
        b'{"protocol": true, "session": "' + b"0" * 32 + b'", "boot": "' + b"0" * 32 + b'"}\n',
        b'{"protocol": "1", "session": "' + b"0" * 32 + b'", "boot": "' + b"0" * 32 + b'"}\n',
        b'{"protocol": 1}\n',
        b"\xff\xfe\n",
    ],
)
def test_a_hello_that_is_not_of_the_protocol_is_unavailable(folder: Path, line: bytes) -> None:
    with service_double(folder, greet=lambda number: line), CacheClient(folder, owner="t") as client:
        with pytest.raises(Unavailable, match=r"hello|no session"):
            probe_lookup(client)
        assert client.boot is None


@pytest.mark.parametrize(
    ("oldest", "newest", "words"),
    [
        (1, None, ""),
        (1, 1, ""),
        (1, 7, ""),
        (2, None, "use a client of its release"),
        (2, 3, "use a client of its release"),
        (0, 0, "one version"),
        (None, 1, "one version"),
    ],
)
def test_a_service_is_spoken_to_that_speaks_this_clients_protocol(
    oldest: int | None, newest: int | None, words: str
) -> None:
    """PROTOCOL is 1: there is none before it that a service could stop at."""

    def check() -> Hello:
        return check_hello(oldest, newest, "a" * 32, "b" * 32, said="all of it")

    if not words:
        assert check() == Hello("a" * 32, "b" * 32)
        return
    with pytest.raises(Unavailable, match=words) as refused:
        check()
    assert "allowed: protocol 1" in str(refused.value)


@pytest.mark.parametrize("spoken", [b'"protocol": 1', b'"protocol": 1, "newest": 5'])
def test_a_refused_session_has_the_services_own_error(folder: Path, spoken: bytes) -> None:
    line = b"{" + spoken + b', "error": "LIMIT_EXCEEDED", "message": "too many open sessions"}\n'
    with (
        service_double(folder, greet=lambda number: line),
        CacheClient(folder, owner="t") as client,
        pytest.raises(LimitExceeded, match="too many open sessions"),
    ):
        probe_lookup(client)


# ---- sessions -----------------------------------------------------------------------------------------------


def test_an_ended_session_is_noticed_before_the_next_call(folder: Path) -> None:
    with (
        service_double(folder, answers=answering_lookups()) as double,
        CacheClient(folder, owner="t") as client,
    ):
        probe_lookup(client)
        probe_lookup(client)
        double.end_sessions()
        assert client.boot is None
        probe_lookup(client)
        assert [session for _, session in double.calls] == [f"{n:032x}" for n in (1, 1, 2)]


def test_an_unknown_session_is_renewed_once_where_the_call_may_run_twice(folder: Path) -> None:
    def lookup(request: pb.LookupRequest, context: grpc.ServicerContext) -> pb.LookupReply:
        if dict(context.invocation_metadata())["kvstore-session"] != f"{2:032x}":
            refuse(context, grpc.StatusCode.FAILED_PRECONDITION, "UNKNOWN_SESSION", "no such open session")
        return no_plan()

    def always(request: object, context: grpc.ServicerContext) -> None:
        refuse(context, grpc.StatusCode.FAILED_PRECONDITION, "UNKNOWN_SESSION", "no such open session")

    answers = {"Lookup": lookup, "Reserve": always, "Stats": always}
    with service_double(folder, answers=answers) as double, CacheClient(folder, owner="t") as client:
        probe_lookup(client)
        assert [name for name, _ in double.calls] == ["Lookup", "Lookup"]
        with pytest.raises(UnknownSession):
            client.reserve(NAMESPACE, [])
        assert [name for name, _ in double.calls].count("Reserve") == 1
        with pytest.raises(UnknownSession):
            client.stats()
        assert [name for name, _ in double.calls].count("Stats") == 2


def test_another_boot_id_in_an_answer_means_a_new_session(folder: Path) -> None:
    replies = [pb.StatsReply(values={"x": 1.0}, boot="aa" * 16), pb.StatsReply(values={"x": 2.0}, boot=BOOT)]
    answers = {"Stats": lambda request, context: replies.pop(0)}
    with service_double(folder, answers=answers) as double, CacheClient(folder, owner="t") as client:
        assert client.stats() == {"x": 2.0}
        assert [session for _, session in double.calls] == [f"{n:032x}" for n in (1, 2)]


def leased_plan(request: object, context: object) -> pb.LookupReply:
    alternative = pb.Alternative(state_source=pb.CHECKPOINT, compute_from=32, state_at=32, replay_from=32)
    plan = pb.RestorePlan(prompt_tokens=40, chosen=alternative, exactness=pb.EXACT)
    return pb.LookupReply(plan=plan, lease_id=7, lease_seconds=60.0, blocks_held=1)


def test_leases_and_reservations_of_an_ended_session_are_refused_and_never_quoted_to_another(
    folder: Path,
) -> None:
    answers = {
        "Lookup": leased_plan,
        "Reserve": lambda request, context: pb.ReserveReply(
            reservation_id=7, outcomes=[pb.GRANTED], reservation_seconds=60.0
        ),
    }
    with service_double(folder, answers=answers) as double, CacheClient(folder, owner="t") as client:
        lease = client.lookup(NAMESPACE, [b"k" * 32], prompt_tokens=40).lease
        assert lease is not None
        item = ReserveItem(kind=ItemKind.BLOCK, key=b"k" * 32, parent=NAMESPACE, position=32, length=2)
        reservation = client.reserve(NAMESPACE, [item])
        double.end_sessions()
        calls = len(double.calls)
        with pytest.raises(UnknownLease):
            next(client.fetch(lease, first_block=0, block_count=1, state=False))
        with pytest.raises(UnknownReservation):
            reservation.write({0: b"xy"})
        with pytest.raises(UnknownReservation):
            reservation.commit()
        lease.release()
        lease.release()
        assert reservation.abort() is False
        assert len(double.calls) == calls
        # The client itself goes on.
        assert client.lookup(NAMESPACE, [], prompt_tokens=40).blocks_held == 1


# ---- errors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(ALL_ERRORS))
def test_each_error_arrives_as_its_class_with_its_message(folder: Path, name: str) -> None:
    def lookup(request: object, context: grpc.ServicerContext) -> None:
        refuse(context, grpc.StatusCode.UNKNOWN, name, f"because of {name}; field=x")

    with (
        service_double(folder, answers={"Lookup": lookup}),
        CacheClient(folder, owner="t") as client,
        pytest.raises(KvstoreError) as caught,
    ):
        probe_lookup(client)
    assert type(caught.value) is ALL_ERRORS[name]
    assert str(caught.value) == f"because of {name}; field=x"


def test_an_error_of_a_later_version_is_still_a_kvstore_error(folder: Path) -> None:
    def lookup(request: object, context: grpc.ServicerContext) -> None:
        refuse(context, grpc.StatusCode.UNKNOWN, "OUT_OF_CHEESE", "no cheese")

    with (
        service_double(folder, answers={"Lookup": lookup}),
        CacheClient(folder, owner="t") as client,
        pytest.raises(KvstoreError, match="no cheese"),
    ):
        probe_lookup(client)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, Unavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, Unavailable),
        (grpc.StatusCode.UNIMPLEMENTED, Unavailable),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, LimitExceeded),
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidArgument),
        (grpc.StatusCode.INTERNAL, KvstoreError),
        (grpc.StatusCode.UNKNOWN, KvstoreError),
    ],
)
def test_a_status_without_a_name_becomes_the_error_that_fits(
    folder: Path, code: grpc.StatusCode, kind: type
) -> None:
    answers = {"Lookup": lambda request, context: context.abort(code, "just so")}
    with (
        service_double(folder, answers=answers),
        CacheClient(folder, owner="t") as client,
        pytest.raises(KvstoreError, match=r"Lookup failed.*just so") as caught,
    ):
        probe_lookup(client)
    assert type(caught.value) is kind


def test_a_call_past_its_deadline_is_unavailable_and_the_next_one_costs_nothing(folder: Path) -> None:
    released = threading.Event()

    def lookup(request: object, context: object) -> pb.LookupReply:
        released.wait(5)
        return no_plan()

    deadlines = Deadlines(lookup=0.2, pause_first=5.0, pause_most=5.0)
    with (
        service_double(folder, answers={"Lookup": lookup}),
        CacheClient(folder, owner="t", deadlines=deadlines) as client,
    ):
        start = time.monotonic()
        with pytest.raises(Unavailable, match="deadline_exceeded"):
            probe_lookup(client)
        assert 0.15 < time.monotonic() - start < 3.0
        start = time.monotonic()
        with pytest.raises(Unavailable, match="calls again"):
            probe_lookup(client)
        assert time.monotonic() - start < 1.0
        released.set()


@pytest.mark.parametrize(
    "chosen",
    [
        pb.Alternative(state_source=pb.NONE, compute_from=32),
        pb.Alternative(state_source=pb.CHECKPOINT, compute_from=64, state_at=64, replay_from=64),
        pb.Alternative(state_source=pb.CHECKPOINT, compute_from=32, state_at=0, replay_from=32),
        pb.Alternative(state_source=pb.REPLAY, compute_from=32, state_at=32, replay_from=33),
        pb.Alternative(compute_from=0),
        pb.Alternative(state_source=99),  # type: ignore[arg-type]
    ],
    ids=[
        "none_with_tokens",
        "past_the_prompt",
        "state_elsewhere",
        "replay_after_the_end",
        "no_source",
        "unknown_source",
    ],
)
def test_a_plan_that_breaks_its_laws_is_an_error_and_not_followed(
    folder: Path, chosen: pb.Alternative
) -> None:
    reply = pb.LookupReply(plan=pb.RestorePlan(prompt_tokens=40, chosen=chosen, exactness=pb.EXACT))
    with (
        service_double(folder, answers={"Lookup": lambda request, context: reply}),
        CacheClient(folder, owner="t") as client,
        pytest.raises(KvstoreError, match="plan"),
    ):
        probe_lookup(client)


@pytest.mark.parametrize("outcomes", [[], [pb.GRANTED], [pb.GRANTED] * 3, [0, pb.GRANTED], [pb.GRANTED, 9]])
def test_an_answer_to_reserve_that_does_not_fit_is_an_error(folder: Path, outcomes: list[int]) -> None:
    reply = pb.ReserveReply(reservation_id=1, outcomes=outcomes)  # type: ignore[arg-type]
    item = ReserveItem(kind=ItemKind.BLOCK, key=b"k" * 32, parent=NAMESPACE, position=32, length=2)
    with (
        service_double(folder, answers={"Reserve": lambda request, context: reply}),
        CacheClient(folder, owner="t") as client,
        pytest.raises(KvstoreError, match="Reserve is not understood"),
    ):
        client.reserve(NAMESPACE, [item, item])


# ---- what is refused before it is sent ----------------------------------------------------------------------


def test_values_that_the_wire_cannot_carry_are_refused_by_name(folder: Path) -> None:
    item = ReserveItem(kind=ItemKind.BLOCK, key=b"k" * 32, position=-32, length=2)
    with CacheClient(folder, owner="t") as client:
        for call, match in [
            (lambda: client.lookup(NAMESPACE, [b"k" * 32, b"k" * 31], prompt_tokens=9), r"keys\[1\]"),
            (lambda: client.lookup(NAMESPACE, [b"k" * 31, b"k" * 33], prompt_tokens=9), r"keys\[0\]"),
            (lambda: client.lookup(NAMESPACE, [], prompt_tokens=-1), "prompt_tokens=-1"),
            (lambda: client.lookup(NAMESPACE, [], prompt_tokens=1 << 64), "prompt_tokens"),
            (lambda: client.reserve(NAMESPACE, [item]), r"items\[0\].position=-32"),
            (lambda: client.put_handoff(NAMESPACE, position=-1, payload=b""), "position=-1"),
            (lambda: client.put_handoff(NAMESPACE, position=1, payload=b"", takes=-1), "takes=-1"),
            (lambda: client.drop_states(tier="disk"), "tier=disk.*both, pool, ssd"),
        ]:
            with pytest.raises(InvalidArgument, match=match):
                call()


def test_costs_reach_the_service_as_given(folder: Path) -> None:
    seen = []

    def lookup(request: pb.LookupRequest, context: object) -> pb.LookupReply:
        seen.append(request)
        return no_plan(request.prompt_tokens)

    with service_double(folder, answers={"Lookup": lookup}), CacheClient(folder, owner="t") as client:
        client.lookup(
            NAMESPACE, [b"a" * 32, b"b" * 32], prompt_tokens=70, costs=Costs(seconds_per_layer_token=0.5)
        )
        client.lookup(NAMESPACE, [], prompt_tokens=0, lease=False)
    assert (seen[0].keys, seen[0].prompt_tokens, seen[0].lease) == (b"a" * 32 + b"b" * 32, 70, True)
    assert seen[0].costs == pb.Costs(seconds_per_layer_token=0.5)
    assert (seen[1].costs, seen[1].lease) == (pb.Costs(), False)


# ---- the end ------------------------------------------------------------------------------------------------


def test_close_ends_the_session_and_calls_under_way_and_leaves_no_thread(folder: Path) -> None:
    entered, released = threading.Event(), threading.Event()

    def lookup(request: object, context: object) -> pb.LookupReply:
        entered.set()
        released.wait(10)
        return no_plan()

    with service_double(
        folder, answers={"Lookup": lookup, "Stats": lambda r, c: pb.StatsReply(boot=BOOT)}
    ) as double:
        before = set(threading.enumerate())
        client = CacheClient(folder, owner="t", deadlines=Deadlines(lookup=10.0))
        client.stats()
        errors: list[BaseException] = []

        def call() -> None:
            try:
                probe_lookup(client)
            except Unavailable as error:
                errors.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        assert entered.wait(5)
        client.close()
        client.close()
        thread.join(5)
        assert len(errors) == 1
        assert double.sessions[0].recv(1) == b""
        with pytest.raises(Unavailable, match="closed"):
            client.stats()
        released.set()
        pool = {t for t in threading.enumerate() if t.name.startswith("ThreadPoolExecutor")}
        for thread in set(threading.enumerate()) - before - pool:
            thread.join(5)
            assert not thread.is_alive(), thread


def test_after_a_fork_the_client_is_refused_and_the_session_stays_the_parents(folder: Path) -> None:
    with (
        service_double(folder, answers=answering_lookups()) as double,
        CacheClient(folder, owner="t") as client,
    ):
        probe_lookup(client)
        number = client.boot
        read_end, write_end = os.pipe()
        with warnings.catch_warnings():
            # From Python 3.12 on, forking beside threads warns. That it is risky is why this test is here.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            code = 1
            try:
                try:
                    probe_lookup(client)
                except InvalidArgument as error:
                    client.close()
                    code = 0 if client.boot is None and "fork" in str(error) else 2
                # The child lives until it is told to end: its copy of the session must not be what keeps it open.
                os.close(write_end)
                os.read(read_end, 1)
            finally:
                os._exit(code)
        os.close(read_end)
        try:
            probe_lookup(client)
            assert client.boot == number
            client.close()
            double.sessions[0].settimeout(5)
            assert double.sessions[0].recv(1) == b""
        finally:
            os.close(write_end)
            _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0


def test_damage_in_a_stream_cancels_the_call(folder: Path) -> None:
    ended = threading.Event()

    def fetch(request: pb.FetchRequest, context: grpc.ServicerContext) -> Iterator[pb.ItemFrame]:
        context.add_callback(ended.set)
        header = pb.ItemHeader(kind=pb.BLOCK, index=0, length=2, crc32=1, lineage=pb.LINEAGE_EXACT)
        yield pb.ItemFrame(items=[header], data=b"ab")
        ended.wait(5)

    with (
        service_double(folder, answers={"Lookup": leased_plan, "Fetch": fetch}),
        CacheClient(folder, owner="t") as client,
    ):
        lease = client.lookup(NAMESPACE, [b"k" * 32], prompt_tokens=40).lease
        assert lease is not None
        with pytest.raises(DamagedBytes, match="block 0"):
            list(client.fetch(lease, first_block=0, block_count=1, state=False))
        assert ended.wait(5)


@pytest.mark.parametrize("name", ["plain", "with space", "per%20cent", "ha#sh?x=1", "naïve", "semi;colon"])
def test_a_directory_of_any_name_is_reached(folder: Path, name: str) -> None:
    directory = folder / name
    directory.mkdir()
    # The double binds the gRPC socket under a plain name, since gRPC reads the path as part of a URI.
    with service_double(folder, answers=answering_lookups()):
        for socket in ("kvstore.sock", "session.sock"):
            (directory / socket).symlink_to(folder / socket)
        with CacheClient(directory, owner="t", deadlines=QUICK) as client:
            probe_lookup(client)
            assert client.boot == BOOT


def test_the_hello_names_the_sessions_number(folder: Path) -> None:
    with service_double(
        folder, greet=lambda number: hello(number + 40), answers=answering_lookups()
    ) as double:
        with CacheClient(folder, owner="t") as client:
            probe_lookup(client)
        assert double.calls == [("Lookup", f"{41:032x}")]
