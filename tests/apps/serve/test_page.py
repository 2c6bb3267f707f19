"""The page of `serve` in headless Chromium, driven as a person does."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from sites import Site, Template, site, wait_until

from meshwright.apps.pages.guard import Limits

playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install playwright"
)

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.long
expect = playwright.expect


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as p:
        try:
            # In a container Chromium's own sandbox is not allowed to start.
            yield p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(
                f"no Chromium: set CHROMIUM to it, or run `playwright install chromium` ({error})"
            )


@pytest.fixture(scope="module")
def slow() -> Iterator[Site]:
    with site(pause=0.03) as running:
        yield running


@pytest.fixture(scope="module")
def talking() -> Iterator[Site]:
    """Serve a model with a chat template."""
    with site(pause=0.03, template=Template()) as running:
        yield running


@contextlib.contextmanager
def opened(browser: Any, running: Site) -> Iterator[Any]:
    errors: list[str] = []
    page = browser.new_page(viewport={"width": 1000, "height": 720}, locale="en-US")
    page.on("console", lambda m: errors.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    address = f"http://127.0.0.1:{running.port}/"
    page.on(
        "request", lambda r: None if r.url.startswith((address, "data:")) else errors.append(r.url)
    )
    page.goto(address)
    yield page
    page.close()
    assert errors == []


@pytest.fixture
def page(browser: Any, slow: Site) -> Iterator[Any]:
    with opened(browser, slow) as page:
        yield page


def test_a_completion(page: Any, slow: Site) -> None:
    expect(page.locator("#name")).to_have_text("fake")
    expect(page.locator("#facts")).to_have_text("step 7, reads 64 tokens")
    page.fill("#prompt", "the cat. ")
    page.locator("#max_tokens").fill("30")
    expect(page.locator("output[for=max_tokens]")).to_have_text("30")
    page.locator("#temperature").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("output[for=temperature]")).to_have_text("0.85")
    page.click("#generate")
    # It is written while it is generated.
    expect(page.locator("#text .token").nth(2)).to_be_visible()
    assert page.locator("#text .token").count() < 30
    expect(page.locator("#completion .stop")).to_be_enabled()
    expect(page.locator("#text")).to_have_text("the cat. " * 4 + "the", timeout=5000)
    expect(page.locator("#state")).to_contain_text("cut at the length")
    s = slow.decoder.submitted[-1].options
    assert (s.out_seq_length, s.temperature, s.top_p) == (30, 0.85, 0)
    page.click("#append")
    assert page.input_value("#prompt") == "the cat. " * 4 + "the"


def test_probabilities_by_mouse_and_keys(page: Any) -> None:
    page.fill("#prompt", "a b")
    page.fill("#stops", "b")
    page.keyboard.press("Control+Enter")
    expect(page.locator("#state")).to_contain_text("ended by itself")
    expect(page.locator("#text")).to_have_text("a ba ")
    page.hover("#text .token >> nth=0")
    expect(page.locator("#tip .chosen")).to_have_text("a60.7 %")
    expect(page.locator("#tip div")).to_have_count(3)
    page.mouse.move(5, 5)
    expect(page.locator("#tip")).to_be_hidden()
    page.focus("#text")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#tip .chosen code")).to_have_text("␣")
    page.keyboard.press("Escape")
    expect(page.locator("#tip")).to_be_hidden()


@pytest.mark.parametrize("by", ["button", "key"])
def test_stop(page: Any, slow: Site, by: str) -> None:
    page.fill("#prompt", "abc")
    page.click("#generate")
    expect(page.locator("#text .token").nth(3)).to_be_visible()
    page.click("#completion .stop") if by == "button" else page.keyboard.press("Escape")
    expect(page.locator("#state")).to_contain_text("stopped")
    wait_until(lambda: not slow.decoder.rows)
    assert 4 <= page.locator("#text .token").count() < 30
    expect(page.locator("#generate")).to_be_enabled()


def test_a_base_model_offers_no_chat(page: Any) -> None:
    expect(page.locator("#base")).to_contain_text("A base model: it continues a text.")
    expect(page.locator("#tabs")).to_be_hidden()
    expect(page.locator("#completion")).to_be_visible()


def test_a_dialogue(browser: Any, talking: Site) -> None:
    with opened(browser, talking) as page:
        expect(page.locator("#base")).to_be_hidden()
        page.focus("#tab-completion")
        page.keyboard.press("ArrowRight")
        expect(page.locator("#chat")).to_be_visible()
        page.locator("#max_tokens").fill("6")
        turns = []
        for said in ("ab", "cd"):
            page.fill("#message", said)
            page.keyboard.press("Control+Enter")
            turns += [f"You{said}", "Modelu:ab"]
            expect(page.locator(".turn")).to_have_text(turns)
            expect(page.locator("#send")).to_be_enabled()
        assert bytes(talking.decoder.submitted[-1].prompt) == b"u:ab|a:u:ab|u:cd|"
        page.fill("#message", "e" * 40)  # with what was said, more than the model reads
        page.keyboard.press("Control+Enter")
        expect(page.locator("#state")).to_contain_text("4 tokens in")
        left = b"u:cd|a:u:ab|u:" + b"e" * 40 + b"|"
        assert bytes(talking.decoder.submitted[-1].prompt) == left
        page.click("#clear")
        expect(page.locator(".turn")).to_have_count(0)


def test_languages_and_colours(page: Any) -> None:
    page.click("#language")
    expect(page.locator("#generate")).to_have_text("生成")
    expect(page.locator("html")).to_have_attribute("lang", "zh")
    expect(page.locator("#facts")).to_contain_text("第 7 步")
    page.reload()
    expect(page.locator("#generate")).to_have_text("生成")
    page.click("#language")
    expect(page.locator("#generate")).to_have_text("Generate")
    papers = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        papers.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert papers == ["rgb(255, 255, 255)", "rgb(21, 24, 29)"]
    # Every text has a translation.
    assert page.locator("[data-t]:empty").count() == 0


def test_a_key(browser: Any) -> None:
    with site(limits=Limits(api_key="letters-and-digits")) as running:
        page = browser.new_page(locale="zh-CN")
        page.goto(f"http://127.0.0.1:{running.port}/")
        expect(page.locator("#state")).to_contain_text("API key is missing")
        expect(page.locator("#generate")).to_have_text("生成")
        page.fill("#key", "letters-and-digits")
        page.keyboard.press("Tab")
        expect(page.locator("#name")).to_have_text("fake")
        page.close()
