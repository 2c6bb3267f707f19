"""The live page in headless Chromium, while a training runs."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from pages import step_row

from helpers import TINY_FLAGS

for package in ("starlette", "uvicorn"):
    pytest.importorskip(
        package, reason=f"{package} is not installed: pip install 'meshwright[serve]'"
    )
playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install playwright"
)

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
RUNNING = [
    "--train-iters=100000",
    "--tokenizer=byte",
    "--vocab-size=257",
    "--sample-interval=20",
    "--sample-length=4",
]


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as p:
        try:
            # In a container Chromium's own sandbox is not allowed to start.
            yield p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(
                f"no Chromium: set CHROMIUM to it, or run `playwright install chromium` ({error})"
            )


@contextlib.contextmanager
def process(*words):
    """Run a command of ours for the duration of the block; yield its first line."""
    with subprocess.Popen(
        [sys.executable, "-m", "meshwright", *words], stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            yield child.stdout.readline().strip()
        finally:
            child.kill()


@pytest.fixture
def watched(browser, tmp_path):
    """Open the page of a training that goes on, of a run that has ended, and of one to come."""
    ended, running = tmp_path / "ended", tmp_path / "running"
    for folder in (ended, running, tmp_path / "later"):
        folder.mkdir()
    rows = [{"event": "start", "attempt": 1, "iteration": 0, "time": 1.7e9, "train_iters": 3000}]
    rows += [step_row(i, 9.0 if i == 1500 else 2.0 + 1 / i) for i in range(1, 3001)]
    rows += [{"event": "scores", "iteration": 3000, "scores": {"lambada/accuracy": 0.25}}]
    rows += [
        {
            "event": "end",
            "attempt": 1,
            "iteration": 3000,
            "reason": "all iterations done",
            "status": 0,
        }
    ]
    (ended / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folders = [str(ended), str(running), str(tmp_path / "later")]
    errors = []
    with (
        process("watch", *folders, "--port", "0") as address,
        process("train", *TINY_FLAGS, *RUNNING, "--run-dir", str(running)),
    ):
        page = browser.new_page(
            viewport={"width": 1000, "height": 1200}, color_scheme="light", locale="en-US"
        )
        page.on(
            "console",
            lambda message: (
                errors.append(message.text) if message.type in ("error", "warning") else 0
            ),
        )
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on(
            "request",
            lambda r: None if r.url.startswith((address, "data:")) else errors.append(r.url),
        )
        page.goto(address)
        yield page
        page.close()
    assert errors == []


def row_of(page, name):
    return page.locator("#runs tbody tr", has_text=name)


@pytest.mark.long
def test_the_page(watched):
    page, plot = watched, watched.locator("figure[data-key=loss] .plot")
    expect = playwright.expect
    expect.set_options(timeout=20_000)
    expect(row_of(page, "later")).to_contain_text("waiting for its first row")
    expect(row_of(page, "ended")).to_contain_text("ended: all iterations done")
    steps = row_of(page, "running").locator("td[data-key=step]")
    expect(steps).to_contain_text("of 100,000", timeout=30_000)

    # It grows while the training runs.
    before = steps.inner_text()
    assert re.match(r"[\d,]+ of 100,000$", before)
    expect(steps).not_to_have_text(before)
    expect(page.locator("#samples .sample")).to_have_count(1)
    expect(page.locator("figure[data-key='lambada/accuracy']")).to_be_visible()

    # The legend tells the runs by their colours, and validation by its form.
    legend = page.locator("figure[data-key=loss] .legend")
    expect(legend.locator("span")).to_have_text(["ended", "running", "training", "validation"])
    strokes = legend.locator("line").evaluate_all(
        "lines => lines.map((l) => l.getAttribute('stroke'))"
    )
    assert strokes[0] != strokes[1] and strokes[2:] == 2 * ["currentColor"]
    assert legend.locator("circle").count() == 1

    # The cursor reads values, exactly those of the run, by mouse and by keys.
    row_of(page, "running").locator("input").uncheck()
    box = plot.bounding_box()
    middle = (box["x"] + 58 + (box["width"] - 68) / 2, box["y"] + 80)
    page.mouse.move(*middle)
    shown = page.locator("figure[data-key=loss] .readout")
    expect(shown).to_have_text(re.compile(r"step 1,50\d ?ended: 2.0007 \(median 2.0007\)$"))
    page.mouse.move(0, 0)
    expect(page.locator(".readout:visible")).to_have_count(0)
    plot.focus()
    page.keyboard.press("Home")
    expect(page.locator("figure[data-key=loss] .readout")).to_contain_text("step 1")

    # A drag zooms in all pictures; a double click goes back.
    page.mouse.move(middle[0] - 5, middle[1])
    page.mouse.down()
    page.mouse.move(middle[0] + 5, middle[1], steps=3)
    with page.expect_response("**/api/curves*"):
        page.mouse.up()
    page.wait_for_timeout(300)  # until it is drawn
    plot.focus()
    page.keyboard.press("Home")
    readout = page.locator("figure[data-key=loss] .readout b")
    expect(readout).to_contain_text("step 1,48")
    with page.expect_response("**/api/curves*"):
        page.keyboard.press("0")
    page.wait_for_timeout(300)
    page.keyboard.press("Home")
    expect(readout).to_contain_text("step 1")

    # Axes, scales, language and colours.
    with page.expect_response(lambda answer: "axis=time" in answer.url):
        page.select_option("#axis", "time")
    page.wait_for_timeout(300)
    plot.focus()
    page.keyboard.press("End")
    expect(readout).to_have_text("time in steps 0:30")
    page.keyboard.press("l")
    expect(page.locator("figure[data-key=loss] button")).to_have_attribute("aria-pressed", "true")
    page.click("#language")
    expect(page.locator("#curves-title")).to_have_text("曲线")
    expect(page.locator("html")).to_have_attribute("lang", "zh-CN")
    expect(row_of(page, "later")).to_contain_text("等待第一行数据")
    light = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    page.click("#theme")
    assert page.evaluate("() => getComputedStyle(document.body).backgroundColor") != light
    page.reload()
    expect(page.locator("#curves-title")).to_have_text("曲线")
    assert page.evaluate("() => document.documentElement.dataset.theme") == "dark"

    # A phone's width needs no sideways scrolling.
    page.set_viewport_size({"width": 360, "height": 700})
    expect(plot).to_be_visible()
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 360
    loss = row_of(page, "ended").locator("td[data-key=loss]").bounding_box()  # nor does the loss
    assert loss["x"] + loss["width"] <= 360
