"""The page at /, in a real browser: chromium and its driver; without them only its headers."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from .client import running
from .fake_engine import FakeEngine

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(not (BROWSER and DRIVER), reason="chromium is not installed")
WAIT_SECONDS = 20


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(BROWSER)
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(DRIVER)))
    try:
        yield driver
        said = driver.get_log("browser")
        assert [s for s in said if not re.search(r"status of 40[01]", s["message"])] == []
    finally:
        driver.quit()


def text_of(driver: Any, element_id: str) -> str:
    return driver.find_element("id", element_id).text


def until(driver: Any, condition: Callable[[], Any]) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(driver, WAIT_SECONDS, 0.05).until(lambda _: condition())


def say(driver: Any, text: str) -> None:
    driver.find_element("id", "text").send_keys(text + "\n")


async def test_what_the_page_asks_for() -> None:
    engine = FakeEngine()
    async with running(engine, api_keys=("secret",)) as client:
        page = await client.get("/")
        assert page.status == 200 and page.headers["Content-Type"] == "text/html; charset=utf-8"
        policy = page.headers["Content-Security-Policy"]
        assert "unsafe" not in policy and "default-src 'none'" in policy and policy.count("sha256-") == 2
        assert "http://" not in page.text and "https://" not in page.text, "nothing from outside"
        assert (await client.request("HEAD", "/")).status == 200
        assert (await client.get("/status")).status == 401
        status = (await client.get("/status", headers={"x-api-key": "secret"})).json
    assert status["ok"] and status["model"]["name"] == "fake-model" and status["notes"] == ["a note"]
    assert status["placements"] == [
        {"device": "CPU", "what": "layers 0 to 3", "weights": 1000, "kv": 2000, "compute": 3000, "threads": 0}
    ]
    assert status["about"] == {
        "model_digest": "00ff", "versions": {"hetero": "1"}, "devices": [{"name": "CPU"}],
        "settings": {"ctx": 0},
    }  # fmt: skip
    assert status["now"]["busy_seconds"] == [2.0]
    assert [tier["name"] for tier in status["tiers"]] == ["on the devices", "in host memory", "on the disk"]
    assert status["tiers"][1] == {
        "name": "in host memory", "used": 8, "total": 8, "text": "128 of 128 tokens in use"
    }  # fmt: skip


@needs_browser
async def test_in_a_browser() -> None:
    engine = FakeEngine()
    engine.script = "<b>Hello</b>, wörld 😸!"

    def look(url: str) -> None:
        with browser() as driver:
            driver.get(url)
            until(driver, lambda: text_of(driver, "health") == "ready")
            assert text_of(driver, "model") == "fake-model"
            assert "layers 0 to 3" in text_of(driver, "places") and "2.0 KiB" in text_of(driver, "places")
            assert text_of(driver, "notes") == "a note" and "tokens in use" in text_of(driver, "tiers")
            until(driver, lambda: text_of(driver, "generated") == "0")  # it has not changed in a second
            say(driver, "hi")
            until(driver, lambda: engine.script in text_of(driver, "talk"))
            assert not driver.find_elements("css selector", "#talk b"), "what a model says is text"
            until(driver, lambda: text_of(driver, "send") == "Send")
            widths = [bar.size["width"] for bar in driver.find_elements("css selector", ".bar i")]
            assert 0 < widths[0] < widths[1] / 4 and widths[2] == 0, "as full as the tiers are"
            say(driver, "raise")  # the engine refuses this
            until(driver, lambda: "roles must alternate" in text_of(driver, "talk"))
            engine.token_seconds = 0.3
            say(driver, "and again")
            until(driver, lambda: engine.running)
            until(driver, lambda: text_of(driver, "send") == "Stop")
            driver.find_element("id", "send").click()
            until(driver, lambda: not engine.running)
            assert engine.cancelled == 1
            roles = [message["role"] for message in engine.rendered[-1][0]]
            assert roles == ["user", "assistant", "user"], "what failed is not said again"

    async with running(engine) as client:
        await asyncio.to_thread(look, f"{client.base}/")


@needs_browser
async def test_it_asks_for_a_key() -> None:
    def look(url: str) -> None:
        with browser() as driver:
            driver.get(url)
            until(driver, lambda: driver.find_element("id", "key").is_displayed())
            assert not driver.find_element("id", "main").is_displayed()
            driver.find_element("id", "key").send_keys("secret\n")
            until(driver, lambda: text_of(driver, "health") == "ready")
            assert driver.find_element("id", "main").is_displayed()
            say(driver, "hi")
            until(driver, lambda: "wörld" in text_of(driver, "talk"))

    async with running(FakeEngine(), api_keys=("secret",)) as client:
        await asyncio.to_thread(look, f"{client.base}/")
