"""The status page in a real browser, on a phone and on a desk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from tests.e2e.service_raw import Chain, Raw
from tests.e2e.test_service_seen import free_address
from tests.support.browser import Page, browser_page, find_browser
from tests.support.service import ServiceProcess, running_service

pytestmark = pytest.mark.deploy

READY = "document.getElementById('state').textContent === 'ready'"
AWAY = "document.getElementById('state').textContent.startsWith('no answer')"


@dataclass
class Shown:
    page: Page
    raw: Raw
    service: ServiceProcess
    url: str

    def text(self, name: str) -> str:
        found: str = self.page.value(f"document.getElementById('{name}').innerText")
        return found


@pytest.fixture
def shown(require: Callable[[str, bool, str], None]) -> Iterator[Shown]:
    program = find_browser()
    require("chromium", program is not None, "Debian: apt-get install --no-install-recommends chromium")
    metrics = free_address()
    with ExitStack() as stack:
        service = stack.enter_context(running_service(metrics=metrics))
        raw = stack.enter_context(Raw(service.directory))
        chain = Chain(raw.open("n"), 40, seed=1)
        raw.store(chain)
        raw.fetch(raw.lookup(chain).lease_id, count=20)
        page = stack.enter_context(browser_page(str(program)))
        yield Shown(page, raw, service, f"http://{metrics}/")


@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_fits_fills_and_follows_the_service(shown: Shown, width: int) -> None:
    page = shown.page
    page.resize(width, 800)
    page.open(shown.url)
    page.wait_for(READY)
    assert page.value("document.documentElement.scrollWidth") == width, (
        "nothing is to be scrolled to the side"
    )
    cut = """[...document.querySelectorAll('section *')]
        .filter(node => node.scrollWidth > node.clientWidth + 1 && getComputedStyle(node).display === 'block')
        .map(node => node.outerHTML)"""
    assert page.value(cut) == []
    assert "40" in shown.text("rates")
    assert "REPLAY: 1,280 of 1,281 tokens" in shown.text("plans")
    assert "runner-up: NONE" in shown.text("plans")
    assert "Commit" in shown.text("slow")
    for name in ("SSD", "Block cache", "Pool of window states"):
        assert name in shown.text("tiers")
    assert "nothing has left yet" in shown.text("retention")
    assert "no budget set" in shown.text("wear")
    columns = page.value("getComputedStyle(document.querySelector('.half')).gridColumnStart")
    assert columns == ("span 6" if width > 900 else "span 12")

    # By itself, and without being loaded again.
    shown.raw.store(Chain(shown.raw.open("n"), 2, seed=2))
    page.wait_for("document.getElementById('rates').innerText.includes('42')")
    assert {url.removeprefix(shown.url) for url in page.asked_for} == {"", "status.json"}
    assert page.errors == []
    shown.service.kill()
    page.wait_for(AWAY)


def test_the_page_is_readable_by_day_and_by_night(shown: Shown) -> None:
    page = shown.page
    contrast = """(() => {
        const light = text => {
            const [r, g, b] = text.match(/[0-9.]+/g).map(Number).map(c => c / 255)
                .map(c => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        const of = name => getComputedStyle(document.querySelector(name));
        const card = light(of('section').backgroundColor);
        return ['b', 'h2', 'dt', '.list small', '#retention .quiet', '.good'].map(name => {
            const text = light(of(name).color);
            return (Math.max(text, card) + 0.05) / (Math.min(text, card) + 0.05);
        });
    })()"""
    backgrounds = []
    for dark in (False, True):
        page.resize(1280, 800, dark=dark)
        page.open(shown.url)
        page.wait_for(READY)
        assert min(page.value(contrast)) >= 4.5
        backgrounds.append(page.value("getComputedStyle(document.body).backgroundColor"))
    assert backgrounds[0] != backgrounds[1]
