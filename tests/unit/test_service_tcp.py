"""What the options say about TCP: certificates, tokens, and what is refused before anything listens."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization

from kvstore.config import ServiceConfig, load_service_config
from kvstore.errors import ConfigError
from kvstore.service.callers import TOLD_EVERY_SECONDS, Access, CallerCheck
from kvstore.service.certificates import read_pair
from kvstore.service.tcp import tcp_end
from kvstore.service.tokens import Tokens, parse_tokens, read_tokens
from tests.support.remote import TOKENS, Secrets, make_secrets, write_private

DAY = dt.timedelta(days=1)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Secrets:
    return make_secrets(tmp_path_factory.mktemp("tls"))


def config(**options: Any) -> ServiceConfig:
    return ServiceConfig(dir="/d", **options)


# ---- what goes together ---------------------------------------------------------------------------------------------


def test_nothing_listens_unless_it_was_asked_for() -> None:
    assert tcp_end(config()) is None


def test_with_a_certificate_and_tokens_it_listens(files: Secrets) -> None:
    end = tcp_end(config(**files.options))
    assert end is not None
    assert (end.host, end.port, end.about) == ("127.0.0.1", 0, "TLS, tokens: 2")


@pytest.mark.parametrize(
    ("listen", "address"),
    [("[::1]:7", "[::1]:7"), ("0.0.0.0:0", "0.0.0.0:0"), ("some.host:65535", "some.host:65535")],
)
def test_an_address_reads_back_as_it_was_given(listen: str, address: str) -> None:
    end = tcp_end(config(listen=listen, unsafe_plaintext_tcp=True, unsafe_no_token=True))
    assert end is not None
    assert end.address() == address
    assert end.about == "PLAINTEXT, NO TOKEN"


@pytest.mark.parametrize("listen", ["here", ":1", "h:", "h:65536", "h:-1", "h:１", "[::1]"])
def test_what_is_no_address_is_refused_by_name(listen: str) -> None:
    with pytest.raises(ConfigError, match="listen="):
        tcp_end(config(listen=listen))


@pytest.mark.parametrize(
    ("left_out", "added", "words"),
    [
        (("tls_cert", "tls_key"), {}, r"listen=.*--tls-cert and --tls-key.*--unsafe-plaintext-tcp"),
        (("token_file",), {}, r"listen=.*--token-file.*--unsafe-no-token"),
        (("tls_key",), {}, r"tls_key"),
        (("tls_cert",), {}, r"tls_cert"),
        ((), {"unsafe_plaintext_tcp": True}, r"unsafe_plaintext_tcp"),
        ((), {"unsafe_no_token": True}, r"unsafe_no_token"),
        (("listen",), {}, r"with --listen"),
        (("tls_cert", "tls_key", "token_file"), {"unsafe_plaintext_tcp": True}, r"--token-file"),
        (("tls_cert", "tls_key", "token_file"), {"unsafe_no_token": True}, r"--tls-cert"),
    ],
)
def test_what_is_unsafe_or_does_not_go_together_is_refused(
    files: Secrets, left_out: tuple[str, ...], added: dict[str, Any], words: str
) -> None:
    options: dict[str, Any] = {key: value for key, value in files.options.items() if key not in left_out}
    with pytest.raises(ConfigError, match=words):
        tcp_end(config(**options, **added))


@pytest.mark.parametrize(
    ("text", "want"), [("yes", True), ("TRUE", True), ("1", True), ("no", False), ("0", False)]
)
def test_a_flag_is_said_in_words(text: str, want: bool) -> None:
    made = load_service_config({"dir": "/d"}, environ={"KVSTORE_UNSAFE_NO_TOKEN": text})
    assert made.unsafe_no_token is want


def test_a_flag_that_is_neither_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"--unsafe-no-token=maybe; allowed: yes or no"):
        load_service_config({"dir": "/d", "unsafe_no_token": "maybe"}, environ={})


# ---- certificates ---------------------------------------------------------------------------------------------------


def test_a_certificate_with_its_key_is_read(files: Secrets) -> None:
    pair = read_pair(files.options["tls_cert"], files.options["tls_key"])
    assert pair.certificate == (files.folder / "cert.pem").read_bytes()
    assert pair.key == (files.folder / "key.pem").read_bytes()


@pytest.mark.parametrize(("begins", "ends", "words"), [(-2, -1, "has expired"), (1, 2, "is not valid yet")])
def test_a_certificate_outside_its_dates_is_refused(
    tmp_path: Path, begins: int, ends: int, words: str
) -> None:
    now = dt.datetime.now(dt.UTC)
    made = make_secrets(tmp_path / "dated", not_before=now + begins * DAY, not_after=now + ends * DAY)
    with pytest.raises(ConfigError, match=f"{words}; tls_cert="):
        read_pair(made.options["tls_cert"], made.options["tls_key"])


def test_the_key_of_another_certificate_is_refused(files: Secrets, tmp_path: Path) -> None:
    other = make_secrets(tmp_path / "other")
    with pytest.raises(ConfigError, match="not the certificate's; tls_key="):
        read_pair(files.options["tls_cert"], other.options["tls_key"])


def test_what_is_not_there_or_not_pem_is_refused(files: Secrets, tmp_path: Path) -> None:
    cert, key = files.options["tls_cert"], files.options["tls_key"]
    with pytest.raises(ConfigError, match="cannot be read: No such file or directory; tls_cert="):
        read_pair(str(tmp_path / "none"), key)
    with pytest.raises(ConfigError, match="cannot be read: Is a directory; tls_key="):
        read_pair(cert, str(tmp_path))
    (tmp_path / "text").write_text("no certificate")
    with pytest.raises(ConfigError, match="not a certificate with its key in PEM"):
        read_pair(str(tmp_path / "text"), key)
    with pytest.raises(ConfigError, match="not a certificate with its key in PEM"):
        read_pair(cert, cert)


def test_a_key_with_a_password_is_refused_and_nobody_is_asked_for_it(files: Secrets, tmp_path: Path) -> None:
    key = serialization.load_pem_private_key((files.folder / "key.pem").read_bytes(), None)
    locked = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    (tmp_path / "locked").write_bytes(locked)
    with pytest.raises(ConfigError, match="locked with a password; tls_key="):
        read_pair(files.options["tls_cert"], str(tmp_path / "locked"))


# ---- tokens ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shown", "good"),
    [
        (f"Bearer {TOKENS[0]}", True),
        (f"bearer {TOKENS[1]}", True),
        (TOKENS[0], False),
        (f"Bearer  {TOKENS[0]}", False),
        (f"Bearer {TOKENS[0]} ", False),
        (f"Bearer {TOKENS[0].upper()}", False),
        (f"Basic  {TOKENS[0]}", False),
        ("Bearer ", False),
        ("", False),
        (f"bearer {TOKENS[0]}".encode(), True),
        (b"Bearer \xff", False),
    ],
)
def test_a_token_is_shown_as_it_is(shown: str | bytes, good: bool) -> None:
    assert Tokens(TOKENS).allow(shown) is good


def test_tokens_are_one_a_line() -> None:
    assert len(parse_tokens(f"{TOKENS[0]}\n\n  {TOKENS[1]}\r\n", file="f")) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "0 tokens"),
        ("\n\n", "0 tokens"),
        ("a-good-one-of-plain-words\nshort", "line 2"),
        ("x" * 15, "line 1"),
        ("x" * 513, "line 1"),
        ("sixteen chars and spaces", "line 1"),
        ("sixteen-chärs-or-more", "line 1"),
        ("\n".join(f"token-number-{i:05}" for i in range(65)), "65 tokens"),
    ],
)
def test_what_is_no_token_is_refused_by_its_line_and_not_shown(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        parse_tokens(text, file="the-file")
    assert "token_file=the-file" in str(caught.value)
    assert "short" not in str(caught.value)
    assert "spaces" not in str(caught.value).replace("without spaces", "")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o700 | 0o010])
def test_a_token_file_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "tokens"
    write_private(file, TOKENS[0].encode())
    assert len(read_tokens(str(file))) == 1
    file.chmod(mode)
    with pytest.raises(ConfigError, match=r"others may read.*chmod 600"):
        read_tokens(str(file))


def test_what_is_no_token_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_tokens(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="not a file"):
        read_tokens("/dev/null")
    write_private(tmp_path / "large", b"x" * (1 << 17))
    with pytest.raises(ConfigError, match="too large"):
        read_tokens(str(tmp_path / "large"))


def test_refusals_are_told_at_a_bounded_rate(caplog: pytest.LogCaptureFixture) -> None:
    counts: Counter[str] = Counter()
    now = [100.0]
    check = CallerCheck(Access, counts=counts, monotonic=lambda: now[0])
    for _ in range(1000):
        check._count("peer")
    assert (len(caplog.records), counts["unauthenticated_total"]) == (1, 1000)
    now[0] += TOLD_EVERY_SECONDS
    check._count("peer")
    assert [record.getMessage() for record in caplog.records] == [
        "refused 1 calls without a good token, the last one from peer",
        "refused 1000 calls without a good token, the last one from peer",
    ]
