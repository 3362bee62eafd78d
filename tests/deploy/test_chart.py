"""The chart as Helm renders it, against Kubernetes' own schemas."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from kvstore.config import load_service_config
from ops.dev import CHART, SHAPES, manifest
from tests.support.deployment import DEPLOY, containers, flags, pod_of

pytestmark = pytest.mark.deploy

KUBERNETES = "1.35"
MORE = (
    "image.digest=sha256:" + "0" * 64,
    "disk.storageClass=fast",
    "cpu.limit=2",
    "nodeSelector.disk=nvme",
    "tolerations[0].operator=Exists",
    "imagePullSecrets[0].name=pull",
    "options.eviction=sieve",
    "tls.clientCaSecret=clients",
    "admin.secret=admins",
    "tenants.secret=tenants",
    "events.port=5557",
    "events.replayPort=5558",
    "engine.resources.limits.nvidia\\.com/gpu=1",
    "engine.env[0].name=A",
    "engine.env[0].value=b",
)
"""Values that the plain manifests leave as they are."""

Require = Callable[[str, bool, str], None]


@pytest.fixture
def helm(require: Require) -> None:
    require("helm", shutil.which("helm") is not None, "no helm on the PATH; `make test-deploy` gets it")


@pytest.fixture
def validate(require: Require) -> Callable[[Path], None]:
    program = shutil.which("kubernetes-validate")
    require("kubernetes-validate", program is not None, "not on the PATH; `make test-deploy` gets it")

    def check(file: Path) -> None:
        done = subprocess.run(
            [str(program), "--strict", "-k", KUBERNETES, str(file)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    return check


def refused(*values: str) -> str:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        manifest(values)
    return str(caught.value.stderr)


@pytest.mark.parametrize("shape", SHAPES)
def test_plain_manifests_are_what_the_chart_gives_and_kubernetes_takes_them(
    shape: str, helm: None, validate: Callable[[Path], None]
) -> None:
    file = DEPLOY / "kubernetes" / f"{shape}.yaml"
    assert manifest(SHAPES[shape]) == file.read_text(encoding="utf-8"), "stale; run `make manifests`"
    validate(file)


@pytest.mark.parametrize("shape", SHAPES)
def test_with_every_other_value_it_is_still_what_kubernetes_takes(
    shape: str, helm: None, validate: Callable[[Path], None], tmp_path: Path
) -> None:
    file = tmp_path / "all.yaml"
    file.write_text(manifest([*SHAPES[shape], *MORE]))
    validate(file)
    pod = pod_of(file)
    given = flags(containers(pod)["kvstore"])
    assert given["eviction"] == "sieve"
    load_service_config(given, environ={})
    secrets = {each["name"]: each["secret"] for each in pod["volumes"] if "secret" in each}
    files = {"tenants": ("tenants", "tenants")}
    if shape == "central":
        files |= {
            "tls_cert": ("tls", "kvstore-tls"),
            "tls_key": ("tls", "kvstore-tls"),
            "token_file": ("tokens", "kvstore-tokens"),
            "tls_client_ca": ("client-ca", "clients"),
            "admin_token_file": ("admin", "admins"),
        }
    mounted = {each["mountPath"]: each["name"] for each in containers(pod)["kvstore"]["volumeMounts"]}
    for option, (name, secret) in files.items():
        assert mounted[str(Path(given[option]).parent)] == name
        assert secrets[name] == {"secretName": secret, "defaultMode": 0o440}
    assert secrets.keys() == {name for name, _ in files.values()}, "no shape mounts what it is not told of"
    assert given["events"].endswith(":5557")
    assert given["events_replay"].endswith(":5558")
    assert pod["nodeSelector"] == {"disk": "nvme"}
    assert containers(pod)["kvstore"]["image"].startswith("kvstore@sha256:")
    if shape == "sidecar":
        assert containers(pod)["engine"]["resources"]["limits"] == {"memory": "20480Mi", "nvidia.com/gpu": 1}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("mode=other", "value must be one of 'sidecar', 'daemonset', 'central'"),
        ("mode=sidecar", "engine.image"),
        ("disk.sise=1GiB", "sise"),
        ("memory.storeMiB=1", "storeMiB"),
        ("retention=3 days", "retention"),
        ("tokens.secret=", "something must let callers in"),
        ("events.port=70000", "events"),
    ],
)
def test_a_value_that_is_none_is_refused_by_name(value: str, said: str, helm: None) -> None:
    assert said in refused(value)


def test_helm_finds_nothing_to_say(helm: None) -> None:
    done = subprocess.run(
        ["helm", "lint", "--strict", str(CHART)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_manifest_without_what_kubernetes_wants_is_noticed(
    validate: Callable[[Path], None], tmp_path: Path
) -> None:
    """The validator is not one that takes anything."""
    file = tmp_path / "bad.yaml"
    document = {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": "x"}, "spec": {"sized": 3}}
    file.write_text(yaml.safe_dump(document))
    with pytest.raises(AssertionError):
        validate(file)
