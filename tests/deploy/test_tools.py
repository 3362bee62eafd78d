"""Alerts, dashboard, unit and container file, as the tools of those who run them see them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.e2e.service_raw import Chain, Raw
from tests.e2e.test_service_seen import free_address
from tests.support.deployment import ALERTS, DEPLOY, expressions
from tests.support.service import running_service

pytestmark = pytest.mark.deploy

EXPOSURE_MAX = 2.0
"""Of 10, as `systemd-analyze security` counts it; below 2 it says OK."""

Require = Callable[[str, bool, str], None]


def _run(*command: str | Path, given: str | None = None) -> str:
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False, input=given
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def promtool(require: Require) -> None:
    require("promtool", shutil.which("promtool") is not None, "not on the PATH; `make test-deploy` gets it")


def test_alerts_say_what_they_are_to_say_and_are_silent_otherwise(promtool: None) -> None:
    _run("promtool", "check", "rules", ALERTS)
    _run("promtool", "test", "rules", ALERTS.with_name("alerts_test.yml"))


def test_prometheus_can_read_all_that_the_dashboard_asks(promtool: None, tmp_path: Path) -> None:
    rules = [
        {"record": f"x:y{number}", "expr": each.replace("$__rate_interval", "5m")}
        for number, each in enumerate(expressions())
    ]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    _run("promtool", "check", "rules", file)


def test_prometheus_can_read_the_page(promtool: None) -> None:
    metrics = free_address()
    with running_service(metrics=metrics) as service, Raw(service.directory) as raw:
        raw.store(Chain(raw.open("n"), 3, seed=1))
        with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=10) as answer:
            page = answer.read().decode()
    done = subprocess.run(
        ["promtool", "check", "metrics"], capture_output=True, text=True, check=False, input=page
    )
    # 1: it cannot be read; 3: it can, and what a linter thinks of names is not all ours.
    assert done.returncode in (0, 3), done.stderr


def test_systemd_takes_the_unit_and_finds_it_closed(require: Require, tmp_path: Path) -> None:
    require("systemd-analyze", shutil.which("systemd-analyze") is not None, "Debian: apt-get install systemd")
    unit = tmp_path / "kvstore.service"
    # It looks whether programs are there.
    unit.write_text(
        (DEPLOY / "systemd" / unit.name).read_text().replace("/opt/kvstore/bin/kvstore", "/bin/true")
    )
    _run("systemd-analyze", "verify", unit)
    said = _run("systemd-analyze", "security", "--offline=true", unit)
    [exposure] = re.findall(r"Overall exposure level for \S+: ([0-9.]+)", said)
    assert float(exposure) <= EXPOSURE_MAX


def test_a_service_makes_no_call_of_the_system_that_the_unit_forbids(
    require: Require, tmp_path: Path
) -> None:
    for name in ("systemd-analyze", "strace"):
        require(name, shutil.which(name) is not None, f"Debian: apt-get install {name.split('-')[0]}")
    trace = tmp_path / "trace"
    metrics = free_address()
    with running_service(tracer=["strace", "-D", "-f", "-qq", "-o", str(trace)], metrics=metrics) as service:
        with Raw(service.directory) as raw:
            chain = Chain(raw.open("n"), 3, seed=1)
            raw.store(chain)
            raw.fetch(raw.lookup(chain).lease_id, count=3)
        service.stop()
    made = set(re.findall(r"^\d+ +([a-z_0-9]+)\(", trace.read_text(), re.M))
    assert {"io_submit", "memfd_create", "fdatasync"} & made
    assert made <= _allowed()


def _allowed() -> set[str]:
    """What is left of the unit's filters, in their order."""
    unit = (DEPLOY / "systemd" / "kvstore.service").read_text()
    allowed: set[str] = set()
    for words in re.findall(r"^SystemCallFilter=(.*)$", unit, re.M):
        calls: set[str] = set()
        for word in words.removeprefix("~").split():
            calls |= _group(word) if word.startswith("@") else {word}
        allowed = allowed - calls if words.startswith("~") else allowed | calls
    return allowed | _group("@default")


def _group(name: str) -> set[str]:
    said = _run("systemd-analyze", "syscall-filter", name)
    found: set[str] = set()
    for line in said.splitlines()[1:]:
        word = line.strip()
        if word and not word.startswith("#"):
            found |= _group(word) if word.startswith("@") else {word}
    return found


def test_hadolint_finds_nothing_in_the_container_file(require: Require) -> None:
    require("hadolint", shutil.which("hadolint") is not None, "not on the PATH; `make test-deploy` gets it")
    found = json.loads(_run("hadolint", "--no-fail", "--format", "json", DEPLOY / "Containerfile"))
    assert found == []
