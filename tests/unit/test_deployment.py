"""Manifests, units and dashboards agree with the command line that there is, and with each other."""

from __future__ import annotations

import configparser
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli.main import build_parser
from kvstore.config import load_service_config, options
from kvstore.service.listening import LIVENESS
from kvstore.service.metrics import split_address
from kvstore.service.server import GRACE_SECONDS
from kvstore.units import parse_size, parse_time
from tests.support.deployment import (
    DASHBOARD,
    DEPLOY,
    MANIFESTS,
    ROOT,
    alert_rules,
    containers,
    documents,
    flags,
    panels,
    pod_of,
)

CONTAINERFILE = (DEPLOY / "Containerfile").read_text(encoding="utf-8")
UNIT = DEPLOY / "systemd" / "kvstore.service"
OPTIONS = {option.name for option in options()}

by_shape = pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.stem)


def mebibytes(text: str) -> int:
    return parse_size(text.replace("Mi", "MiB").replace("Gi", "GiB"), name="quantity") >> 20


def store(file: Path) -> dict[str, Any]:
    return containers(pod_of(file))["kvstore"]


def test_there_is_a_manifest_for_each_shape() -> None:
    assert [file.stem for file in MANIFESTS] == ["central", "daemonset", "sidecar"]


@by_shape
def test_every_flag_is_an_option_and_every_value_one_that_it_takes(file: Path) -> None:
    given = flags(store(file))
    assert given.keys() <= OPTIONS
    config = load_service_config(given, environ={})
    assert config.memory < mebibytes(store(file)["resources"]["limits"]["memory"]) << 20


@by_shape
def test_ports_are_those_of_the_flags_and_probes_ask_health(file: Path) -> None:
    container, given = store(file), flags(store(file))
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    options_of = {"grpc": "listen", "metrics": "metrics", "health": "health"}
    assert ports == {
        name: split_address(given[option])[1] for name, option in options_of.items() if option in given
    }
    for probe in ("startupProbe", "readinessProbe"):
        assert container[probe]["grpc"] == {"port": ports["health"]}
    assert container["livenessProbe"]["grpc"] == {"port": ports["health"], "service": LIVENESS}
    [annotations] = [
        each["spec"]["template"]["metadata"]["annotations"]
        for each in documents(file)
        if "template" in each["spec"]
    ]
    assert annotations["prometheus.io/port"] == str(ports["metrics"])


@by_shape
def test_whatever_the_service_is_told_to_use_is_mounted(file: Path) -> None:
    pod, container, given = pod_of(file), store(file), flags(store(file))
    mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    claims = [
        each["metadata"]["name"]
        for doc in documents(file)
        for each in doc["spec"].get("volumeClaimTemplates", [])
    ]
    assert set(mounted.values()) <= {*claims, *(volume["name"] for volume in pod["volumes"])}
    for option in ("dir", "sockets", "tls_cert", "tls_key", "token_file"):
        if option in given:
            assert any(Path(given[option]).is_relative_to(path) for path in mounted), option


@by_shape
def test_there_is_time_for_a_drain_and_a_stop_before_the_kill(file: Path) -> None:
    grace = pod_of(file)["terminationGracePeriodSeconds"]
    before = 0.0
    if (hook := store(file).get("lifecycle")) is not None:
        program, *words = hook["preStop"]["exec"]["command"]
        args = build_parser("drain").parse_args(words)
        assert program == "kvstore"
        assert args.dir == flags(store(file))["sockets"]
        before = parse_time(args.timeout, name="--timeout")
    assert grace >= before + 2 * GRACE_SECONDS


@by_shape
def test_nobody_is_root_but_who_gives_directories_away(file: Path) -> None:
    pod = pod_of(file)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    for name, container in containers(pod).items():
        rights = container["securityContext"]
        assert rights["allowPrivilegeEscalation"] is False
        assert rights["capabilities"]["drop"] == ["ALL"]
        if name == "own-directories":
            assert rights["capabilities"]["add"] == ["CHOWN"]
        else:
            assert "runAsUser" not in rights
        if name != "engine":
            assert rights["readOnlyRootFilesystem"] is True


def test_a_sidecar_starts_before_its_engine_ends_after_it_and_shares_sockets_and_memory() -> None:
    pod = pod_of(DEPLOY / "kubernetes" / "sidecar.yaml")
    [sidecar] = pod["initContainers"]
    [engine] = pod["containers"]
    assert sidecar["restartPolicy"] == "Always"
    assert "lifecycle" not in sidecar, "a preStop of a sidecar runs while its engine still works"
    shared = {mount["name"] for mount in sidecar["volumeMounts"]} & {
        mount["name"] for mount in engine["volumeMounts"]
    }
    assert shared == {"sockets", "shm"}
    assert {"name": "KVSTORE_DIR", "value": flags(sidecar)["sockets"]} in engine["env"]
    volumes = {volume["name"]: volume["emptyDir"] for volume in pod["volumes"]}
    assert volumes["shm"]["medium"] == volumes["sockets"]["medium"] == "Memory"
    limit, shm = engine["resources"]["limits"]["memory"], volumes["shm"]["sizeLimit"]
    assert mebibytes(limit) > mebibytes(shm)


def test_only_the_central_store_is_on_the_network_and_only_with_tls_and_tokens() -> None:
    listening = {file.stem for file in MANIFESTS if "listen" in flags(store(file))}
    assert listening == {"central"}
    given = flags(store(DEPLOY / "kubernetes" / "central.yaml"))
    assert {"tls_cert", "tls_key", "token_file"} <= given.keys()
    assert not [name for name in given if name.startswith("unsafe")]


def test_the_charts_values_have_a_schema_and_its_versions_are_the_packages() -> None:
    [chart], [values] = (
        documents(DEPLOY / "chart" / "Chart.yaml"),
        documents(DEPLOY / "chart" / "values.yaml"),
    )
    schema = json.loads((DEPLOY / "chart" / "values.schema.json").read_text(encoding="utf-8"))
    assert schema["additionalProperties"] is False
    assert values.keys() | {"global"} == schema["properties"].keys()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert chart["version"] == chart["appVersion"] == project["version"]


def test_the_image_holds_the_service_alone_and_its_variables_are_options() -> None:
    names = re.findall(r"\bKVSTORE_([A-Z_]+)=", CONTAINERFILE)
    assert names
    assert {name.lower() for name in names} <= OPTIONS
    assert "'.[service]'" in CONTAINERFILE
    assert re.search(r"^USER [1-9][0-9]*:[1-9][0-9]*$", CONTAINERFILE, re.M)
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", CONTAINERFILE, re.M)
    let_in = {line.removeprefix("!") for line in (ROOT / ".containerignore").read_text().splitlines()}
    for name in " ".join(copied).split():
        assert (ROOT / name).exists(), name
        assert name in let_in, name


def test_the_unit_runs_what_there_is_with_a_configuration_that_is_taken() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(UNIT)
    service = unit["Service"]
    _, serve, *words = service["ExecStart"].split()
    assert (serve, words) == ("serve", ["--config", "/etc/kvstore/kvstore.toml"])
    config = load_service_config({}, file=str(UNIT.with_name("kvstore.toml")), environ={})
    assert config.dir.startswith(f"/var/lib/{service['StateDirectory']}/")
    assert config.sockets.startswith(f"/run/{service['RuntimeDirectory']}/")
    _, drain, *words = service["ExecStop"].split()
    args = build_parser(drain).parse_args([drain, *words])
    assert args.dir == config.sockets
    assert parse_time(service["TimeoutStopSec"].removesuffix("ec"), name="TimeoutStopSec") >= (
        parse_time(args.timeout, name="--timeout") + 2 * GRACE_SECONDS
    )


def test_the_dashboard_asks_the_data_source_that_is_chosen_and_no_other() -> None:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    assert [each["name"] for each in dashboard["templating"]["list"]] == ["datasource", "job", "instance"]
    sources = {panel["datasource"]["uid"] for panel in panels()}
    sources |= {target["datasource"]["uid"] for panel in panels() for target in panel["targets"]}
    assert sources == {"${datasource}"}
    numbers = [panel["id"] for panel in dashboard["panels"]]
    assert len(numbers) == len(set(numbers))
    assert "id" not in dashboard, "an id is what one installation knows it by"


def test_panels_of_the_dashboard_do_not_lie_on_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_every_alert_says_how_urgent_it_is_and_what_it_means() -> None:
    for rule in alert_rules():
        assert rule["labels"]["severity"] in {"page", "ticket"}
        assert set(rule["annotations"]) == {"summary", "description"}
    tests = (ROOT / "ops" / "prometheus" / "alerts_test.yml").read_text(encoding="utf-8")
    assert not [rule["alert"] for rule in alert_rules() if rule["alert"] not in tests]
