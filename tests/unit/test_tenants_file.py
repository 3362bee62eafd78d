"""The tenants' file: what it says, and how what is wrong in it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.errors import ConfigError
from kvstore.policy.limits import TenantLimits
from kvstore.service.tenants import parse_tenants, read_tenants
from tests.support.remote import write_private

GOOD = """
all_tenants = ["gateway.example"]

[default]
quota = "10GiB"

[tenant.acme]
quota = "1GiB"
in_flight = "64MiB"
calls_per_second = 100
bytes_per_second = "1GiB"
tokens = ["a-token-of-acme-alone"]
certificates = ["acme.example", "both.example"]

[tenant."../x"]
quota = 0
certificates = ["both.example"]
"""


def test_each_tenant_has_its_limits_and_others_the_default() -> None:
    file = parse_tenants(GOOD, file="f")
    assert file.of("acme") == TenantLimits(
        quota=1 << 30, in_flight=64 << 20, calls_per_second=100.0, bytes_per_second=float(1 << 30)
    )
    assert file.of("../x") == TenantLimits(quota=0)
    assert file.of("anybody") == file.of("") == TenantLimits(quota=10 << 30)


def test_tokens_and_certificates_are_good_for_the_tenants_that_name_them() -> None:
    file = parse_tenants(GOOD, file="f")
    assert file.tokens == {"a-token-of-acme-alone": frozenset({"acme"})}
    assert file.certificates == {
        "gateway.example": None,
        "acme.example": frozenset({"acme"}),
        "both.example": frozenset({"acme", "../x"}),
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[tenant.a]\nquota = 1\nqouta = 2\n", "unknown key in the-file, line 3, table [tenant.a]; qouta="),
        ("\n[defaults]\nquota = 1\n", "unknown key in the-file, line 2; defaults="),
        ("[default]\ntokens = ['a-token-that-is-long-enough']\n", "line 2, table [default]; tokens="),
        (
            "[tenant.a]\nquota = '1 stone'\n",
            "not a size in the-file, line 2, table [tenant.a]; quota=1 stone",
        ),
        ("[tenant.a]\nquota = -1\n", "line 2"),
        ("[tenant.a]\nnamespaces = 1.5\n", "not a count in the-file, line 2"),
        ("[tenant.a]\nin_flight = 0\n", "`quota = 0` keeps a tenant out"),
        ("[tenant.a]\ncalls_per_second = 0\n", "out of range in the-file, line 2"),
        ("[tenant.a]\ncalls_per_second = true\n", "not a number in the-file, line 2"),
        ("[tenant.a]\ncalls_per_second = nan\n", "out of range"),
        ("[tenant.a]\ntokens = ['short']\n", "tokens=(not shown)"),
        ("[tenant.a]\ncertificates = 'a'\n", "not a list of certificates"),
        ("tenant = 3\n", "not a table in the-file, line 1"),
        ("[tenant.a]\n[tenant.a]\n", "not TOML"),
        ('[tenant."a\\u0000b"]\nquota = 1\n', "not a tenant's name; tenant of the-file=a\\x00b"),
        (f"[tenant.{'a' * 300}]\n", "not a tenant's name"),
        ('[tenant.""]\n', "not a tenant's name"),
        (f"[tenant.a]\nquota = {'1' * 5000}\n", "not TOML"),
        (f"[tenant.a]\nquota = '{'9' * 400}'\n", "not a size in the-file, line 2"),
        (f"[tenant.a]\ncalls_per_second = {'9' * 400}\n", "out of range in the-file, line 2"),
        (f"[tenant.a]\ntokens = {'[' * 5000}\n", "not TOML"),
    ],
)
def test_what_is_wrong_is_refused_by_name_and_line(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_tenants(text, file="the-file")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "[[tenant]]\ntokens = ['a-token-of-acme-alone']\n",
        "[[tenant.a]]\ntokens = ['a-token-of-acme-alone']\n",
        "[tenant]\na = ['a-token-of-acme-alone']\n",
        "default = 'a-token-of-acme-alone'\n",
        "[tenant.a]\ntokens = 'a-token-of-acme-alone'\n",
        "[tenant.a]\ntoken = 'a-token-of-acme-alone'\n",
    ],
)
def test_no_refusal_shows_a_token(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_tenants(text, file="the-file")
    assert "acme-alone" not in str(caught.value)


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    write_private(file, GOOD.encode())
    assert read_tenants(str(file)).limits.keys() == {"acme", "../x"}
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="others may read"):
        read_tenants(str(file))
    with pytest.raises(ConfigError, match="tenants="):
        read_tenants(str(tmp_path / "none"))
