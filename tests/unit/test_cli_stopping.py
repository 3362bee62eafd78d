"""Work that signals stop in order: where it is stopped, what it leaves, and what a second signal does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import IO

import pytest

from kvstore.cli.stopping import Check, Stopped, stoppable

PREAMBLE = """
import subprocess, sys, threading
from kvstore.cli import main as command
from kvstore.cli.stopping import stoppable

def say(word):
    print(word, flush=True)

def wait_for_stop(check):
    say("begun")
    while True:
        check()
        threading.Event().wait(0.01)
"""
ENDING = """
try:
    stoppable(work, leaves="a scratch folder may be left")
except KeyboardInterrupt:
    say("interrupted")
    sys.exit(130)
"""
IN_ORDER = """
def work(check):
    lock = threading.Lock()
    try:
        with lock:
            wait_for_stop(check)
    finally:
        say("held" if lock.locked() else "free")
"""
DEAF = """
def work(check):
    say("begun")
    threading.Event().wait()
"""
FAILING = """
def work(check):
    try:
        wait_for_stop(check)
    finally:
        raise ValueError("the helper has gone")
"""
WITH_A_CHILD = """
def work(check):
    with subprocess.Popen([sys.executable, "-c", "print(len(input()))"], stdin=subprocess.PIPE) as child:
        try:
            wait_for_stop(check)
        finally:
            child.communicate(b"12345")
            say(child.returncode)
"""


def _begun(work: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + work + ENDING],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert _out(process).readline() == "begun\n"
    return process


def _out(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdout is not None
    return process.stdout


def test_an_answer_and_an_error_come_out_as_they_are_and_handlers_are_as_before() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    error = OSError(5, "the disk")

    def fail(check: Check) -> None:
        check()
        raise error

    assert stoppable(lambda check: (check(), "done"), leaves="") == (None, "done")
    with pytest.raises(OSError, match="the disk") as raised:
        stoppable(fail, leaves="")
    assert raised.value is error
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_check_after_a_signal_raises_in_the_work_and_the_caller_is_interrupted(
    number: signal.Signals,
) -> None:
    found = []

    def work(check: Check) -> str:
        check()
        os.kill(os.getpid(), number)
        while True:
            try:
                check()
            except Stopped:
                found.append("closed")
                raise

    with pytest.raises(KeyboardInterrupt):
        stoppable(work, leaves="")
    assert found == ["closed"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_work_between_its_steps_with_everything_closed(number: signal.Signals) -> None:
    process = _begun(IN_ORDER)
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (130, "free\ninterrupted\n", "")


def test_a_signal_that_comes_twice_at_once_is_one() -> None:
    """As from `timeout`, which tells the process and then its group."""
    process = _begun(IN_ORDER)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=20)
    assert (process.returncode, out) == (130, "free\ninterrupted\n")


def test_a_second_signal_ends_work_that_does_not_listen_and_says_what_is_left() -> None:
    process = _begun(DEAF)
    for _ in range(200):
        process.send_signal(signal.SIGINT)
        try:
            process.wait(0.1)
            break
        except subprocess.TimeoutExpired:
            continue
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (130, "")
    assert err == "kvstore: ended at once; a scratch folder may be left\n"


def test_what_fails_while_it_stops_is_told_and_interrupted_all_the_same() -> None:
    process = _begun(FAILING)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (130, "interrupted\n")
    assert err == "kvstore: while stopping: the helper has gone\n"


def test_a_terminals_interrupt_reaches_the_command_and_not_the_helpers_of_the_work() -> None:
    process = _begun(WITH_A_CHILD)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (130, "5\n0\ninterrupted\n", "")
