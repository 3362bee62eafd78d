"""The files that operators take, read for tests: manifests, dashboard, alerts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "ops" / "deploy"
DASHBOARD = ROOT / "ops" / "grafana" / "kvstore.json"
ALERTS = ROOT / "ops" / "prometheus" / "alerts.yml"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))

ONLY_AFTER_BLOCKS_LEFT = {"kvstore_retention_attained_share"}
"""Shown from the first block on that leaves by time or for want of room."""


def documents(file: Path) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(file.read_text(encoding="utf-8")) if each]


def pod_of(file: Path) -> dict[str, Any]:
    """The pod's spec of the one workload in a manifest."""
    [pod] = [each["spec"]["template"]["spec"] for each in documents(file) if "template" in each["spec"]]
    found: dict[str, Any] = pod
    return found


def containers(pod: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By name; those that start before the others, too."""
    return {each["name"]: each for each in [*pod.get("initContainers", []), *pod["containers"]]}


def flags(container: dict[str, Any]) -> dict[str, str]:
    """Options of `serve` on a container's command line, by the names that the configuration has for them."""
    command, *rest = container["args"]
    assert command == "serve"
    pairs = [word.removeprefix("--").partition("=") for word in rest]
    assert all(word.startswith("--") for word in rest)
    return {name.replace("-", "_"): value for name, _, value in pairs}


def panels() -> list[dict[str, Any]]:
    """Of the dashboard, those that ask something."""
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return [each for each in dashboard["panels"] if each["type"] != "row"]


def alert_rules() -> list[dict[str, Any]]:
    return [rule for group in documents(ALERTS)[0]["groups"] for rule in group["rules"]]


def expressions() -> Iterator[str]:
    """All that dashboard and alerts ask Prometheus for."""
    for panel in panels():
        yield from (target["expr"] for target in panel["targets"])
    yield from (rule["expr"] for rule in alert_rules())


def metrics_asked_for() -> set[str]:
    return {name for each in expressions() for name in re.findall(r"\bkvstore_[a-z_]+", each)}
