"""A real Prometheus that scrapes a real service: what the dashboard asks has answers, and alerts fire."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.service_raw import Chain, Raw
from tests.e2e.test_service_seen import free_address
from tests.support.deployment import ALERTS, ONLY_AFTER_BLOCKS_LEFT, panels
from tests.support.polling import wait_for
from tests.support.service import ServiceProcess, running_service

pytestmark = pytest.mark.deploy

VARIABLES = {"$__rate_interval": "10s", "$job": ".*", "$instance": ".*"}
SECONDS = 60.0
"""For a machine that does much else."""


@dataclass
class Watched:
    service: ServiceProcess
    prometheus: str

    def ask(self, path: str, **query: str) -> Any:
        """Empty while it does not listen, or is not ready, yet."""
        url = f"http://{self.prometheus}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.URLError as error:
            if isinstance(error.reason, ConnectionRefusedError) or getattr(error, "code", 0) == 503:
                return {}
            raise

    def samples(self, query: str) -> list[Any]:
        found: list[Any] = self.ask("query", query=query).get("result", [])
        return found


@pytest.fixture
def watched(require: Callable[[str, bool, str], None], tmp_path: Path) -> Iterator[Watched]:
    program = shutil.which("prometheus")
    require("promtool", program is not None, "no prometheus on the PATH; `make test-deploy` gets it")
    metrics, listen = free_address(), free_address()
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ALERTS)],
        "scrape_configs": [{"job_name": "kvstore", "static_configs": [{"targets": [metrics]}]}],
    }
    (tmp_path / "p.yml").write_text(yaml.safe_dump(config))
    with ExitStack() as stack:
        service = stack.enter_context(running_service(metrics=metrics, wear=8 << 30))
        raw = stack.enter_context(Raw(service.directory))
        words = [
            f"--config.file={tmp_path / 'p.yml'}",
            f"--storage.tsdb.path={tmp_path}",
            f"--web.listen-address={listen}",
        ]
        with (tmp_path / "log").open("wb") as log:
            process = subprocess.Popen([str(program), *words], stdout=log, stderr=log)
        stack.callback(process.wait, 30)
        stack.callback(process.terminate)
        found = Watched(service, listen)
        wait_for(lambda: bool(found.samples("kvstore_ready == 1")), SECONDS)
        # Something happens between two scrapes, so that rates are known.
        chain = Chain(raw.open("n"), 3, seed=1)
        raw.store(chain)
        raw.fetch(raw.lookup(chain).lease_id, count=3)
        wait_for(lambda: bool(found.samples("rate(kvstore_lookups_total[10s]) > 0")), SECONDS)
        yield found


def test_every_panel_of_the_dashboard_has_something_to_show(watched: Watched) -> None:
    unanswered = []
    for panel in panels():
        for target in panel["targets"]:
            query = target["expr"]
            for name, value in VARIABLES.items():
                query = query.replace(name, value)
            if not watched.samples(query):
                unanswered.append(query)
    [only] = ONLY_AFTER_BLOCKS_LEFT
    assert [query for query in unanswered if only not in query] == []


def test_of_a_service_that_is_well_no_alert_is_due_and_of_one_that_is_gone_one_is(watched: Watched) -> None:
    # A start has saved little of its drive's budget yet.
    assert alerts_of(watched) <= {"KvstoreWearSpent"}
    rules = [rule for group in watched.ask("rules")["groups"] for rule in group["rules"]]
    assert {rule["health"] for rule in rules} <= {"ok", "unknown"}
    watched.service.kill()

    wait_for(lambda: "KvstoreDown" in alerts_of(watched), SECONDS)


def alerts_of(watched: Watched) -> set[str]:
    """Those that are due, or will be if things stay so."""
    return {each["labels"]["alertname"] for each in watched.ask("alerts")["alerts"]}
