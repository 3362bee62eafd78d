"""Files that say who is let in, read anew while they are written."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest

from kvstore.config import ServiceConfig
from kvstore.service.certificates import Pair
from kvstore.service.reloading import Began, Reloading, begin, signature_of
from kvstore.service.tcp import Trust, files_of
from tests.support.remote import make_secrets, write_private

WHOLE = "[default]\nquota = 1\n[tenant.acme]\nquota = 1000\n"


class Inline(Executor):
    """Does its work at once; `meanwhile` happens once, at the end of the work `number`, which counts from 1."""

    def __init__(self, number: int = 0, meanwhile: Callable[[], object] = lambda: None) -> None:
        self._left = number
        self._meanwhile = meanwhile

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 -- as an executor does
            done.set_exception(error)
        self._left -= 1
        if not self._left:
            self._meanwhile()
        return done


class Rig:
    def __init__(self, folder: Path) -> None:
        self.file = folder / "tenants.toml"
        write_private(self.file, WHOLE.encode())
        config = ServiceConfig(dir=str(folder), tenants=str(self.file))
        self.adopted: list[Trust] = []
        began, _ = begin(config)
        self.reloading = Reloading(config, began, self.adopted.append)

    @property
    def quotas(self) -> list[int | None]:
        return [trust.tenants.of("acme").quota for trust in self.adopted]

    async def look(self, threads: Executor | None = None, *, at_once: bool = False) -> None:
        await self.reloading.look(threads or Inline(), at_once=at_once)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


async def test_half_of_a_file_that_is_being_written_is_not_taken_for_all_of_it(rig: Rig) -> None:
    new = WHOLE.replace("1000", "2000")
    half = new[: new.index("[tenant")]
    rig.file.write_text(half)
    await rig.look()
    rig.file.write_text(new)
    await rig.look()
    assert rig.quotas == [1000], "the default of the first half would have had the tenant's blocks evicted"
    await rig.look()
    assert rig.quotas == [1000, 2000]
    await rig.look()
    assert rig.reloading.reloaded_total == 1


async def test_what_changes_while_it_is_read_is_read_once_more(rig: Rig) -> None:
    rig.file.write_text(WHOLE.replace("1000", "30"))
    await rig.look()
    await rig.look(Inline(2, lambda: rig.file.write_text(WHOLE.replace("1000", "4000"))))
    assert rig.quotas == [1000]
    await rig.look()
    assert rig.quotas == [1000, 4000]


async def test_who_asks_is_taken_at_his_word_also_while_it_is_being_read(rig: Rig) -> None:
    rig.file.write_text(WHOLE.replace("1000", "2000"))
    await rig.look(Inline(2, rig.reloading.ask), at_once=True)
    assert rig.quotas == [1000, 2000]
    await rig.look(at_once=True)
    assert rig.reloading.reloaded_total == 2


@pytest.mark.parametrize("text", [f"a = {'[' * 5000}", f"[default]\nquota = {'1' * 5000}", "\0", "[[["])
async def test_no_file_keeps_later_ones_from_being_read(rig: Rig, text: str) -> None:
    rig.file.write_text(text)
    await rig.look()
    await rig.look()
    assert (rig.reloading.is_failing, rig.reloading.failed_total, rig.quotas) == (True, 1, [1000])
    rig.file.write_text(WHOLE.replace("1000", "2000"))
    await rig.look()
    await rig.look()
    assert (rig.reloading.is_failing, rig.quotas) == (False, [1000, 2000])


async def test_a_certificate_that_has_expired_in_use_does_not_keep_a_token_from_being_taken_away(
    tmp_path: Path,
) -> None:
    now = dt.datetime.now(dt.UTC)
    day = dt.timedelta(days=1)
    files = make_secrets(tmp_path / "tls", not_before=now - 2 * day, not_after=now - day)
    config = ServiceConfig(dir=str(tmp_path), **files.options)
    in_use = Pair((files.folder / "cert.pem").read_bytes(), (files.folder / "key.pem").read_bytes())
    adopted: list[Trust] = []
    reloading = Reloading(config, Began(Trust(in_use), signature_of(files_of(config))), adopted.append)
    write_private(files.folder / "tokens", b"the-only-token-that-is-left")
    await reloading.look(Inline(), at_once=True)
    assert (reloading.is_failing, len(adopted[-1].access.tokens)) == (False, 1)
    another = make_secrets(tmp_path / "more", not_before=now - 2 * day, not_after=now - day)
    for name in ("cert.pem", "key.pem"):
        (another.folder / name).replace(files.folder / name)
    await reloading.look(Inline(), at_once=True)
    assert reloading.is_failing, "another one is looked at"
    assert adopted[-1].pair == in_use
