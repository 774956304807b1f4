"""The page in a real browser, while a run goes on: no error, the snapshot's numbers, every worker, charts that move.

With ``DASKINFER_SCREENSHOTS`` set to a folder, the pictures of the documentation are taken on the way.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any
from urllib.request import urlopen

import pandas as pd
import psutil
import pytest
from distributed import LocalCluster

from daskinfer.cluster import local_cluster
from daskinfer.config import HealthPolicy, RetryPolicy
from daskinfer.driver import Driver
from daskinfer.testing import echo_spec, wait_until

webdriver = pytest.importorskip("selenium.webdriver")

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.cluster,
    pytest.mark.keeps_children,
    pytest.mark.timeout(280),
]
PICTURES = os.environ.get("DASKINFER_SCREENSHOTS")
ROWS = 900
TEXT = """
const model = window.Bokeh?.documents[0]?.get_model_by_name(arguments[0]);
return model ? model.text : "";
"""
POINTS = """
const plot = window.Bokeh?.documents[0]?.get_model_by_name(arguments[0]);
return plot ? plot.renderers[0].data_source.get_length() : 0;
"""
DRAWN = """
const canvases = [];
const walk = (node) => {
  for (const child of node.querySelectorAll("*")) {
    if (child.tagName === "CANVAS" && child.width > 50) canvases.push(child);
    if (child.shadowRoot) walk(child.shadowRoot);
  }
};
walk(document);
return canvases.map((canvas) => canvas.toDataURL().length);
"""


@pytest.fixture
def browser(require_chromium: tuple[str, str]) -> Iterator[Any]:
    chromium, driver = require_chromium
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    page = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield page
    page.quit()


@pytest.fixture
def own_cluster() -> Iterator[LocalCluster]:
    made = local_cluster(3, dashboard_address=":0")
    yield made
    made.close()


def screen(browser: Any, width: int, height: int, *, dark: bool = False, phone: bool = False) -> None:
    metrics = {"width": width, "height": height, "deviceScaleFactor": 2 if phone else 1, "mobile": phone}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    colours = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [colours]})


def picture(browser: Any, name: str) -> None:
    if PICTURES:
        before = browser.execute_script(DRAWN)
        wait_until(lambda: browser.execute_script(DRAWN) != before, 30, "charts drawn anew")
        browser.save_screenshot(str(Path(PICTURES) / f"{name}.png"))


def errors(browser: Any) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def figure(browser: Any, name: str) -> str:
    found = re.search(rf'data-figure="{name}">([^<]*)<', browser.execute_script(TEXT, "summary"))
    return found[1] if found else ""


def states(browser: Any) -> dict[str, list[str]]:
    """State by address, in the order of the table's rows."""
    rows = re.findall(r'title="(tcp://[^"]+)">.*?di-chip[^>]*>([^<]+)<', browser.execute_script(TEXT, "workers"))
    found: dict[str, list[str]] = {}
    for address, state in rows:
        found.setdefault(state, []).append(address)
    return found


def told(cluster: LocalCluster) -> dict[str, Any]:
    with urlopen(json_url(cluster), timeout=10) as answer:
        (model,) = json.load(answer)["models"]
    return dict(model)


def json_url(cluster: LocalCluster) -> str:
    return str(cluster.dashboard_link).replace("/status", "/daskinfer.json")


def test_the_page_during_a_run(own_cluster: LocalCluster, browser: Any, tmp_path: Path) -> None:
    rng = Random(0)
    spec = echo_spec(
        capacity=16,
        step_s=0.03,
        load_s=2.0,
        lengths=[rng.randint(4, 60) for _ in range(ROWS)],
        faults={"bad row": "value_error", "busy": ["connection_error", "ok"]},
        faults_dir=tmp_path / "faults",
    )
    texts = [f"bad row {n}" if n % 97 == 13 else f"busy {n}" if n % 50 == 7 else f"row {n}" for n in range(ROWS)]
    frame = pd.DataFrame({"text": texts})
    reports: list[Any] = []
    with Driver(
        spec, cluster=own_cluster, health=HealthPolicy(poll_s=0.25), retry=RetryPolicy(backoff_s=0.05)
    ) as driver:
        driver.wait_until_ready()
        run = threading.Thread(target=lambda: reports.append(driver.run(frame, tmp_path / "answers", columns="text")))
        run.start()
        screen(browser, 1280, 800)
        browser.get(own_cluster.dashboard_link.replace("/status", "/daskinfer"))
        wait_until(lambda: figure(browser, "finished") not in ("", "0"), 60, "rows on the page")
        wait_until(lambda: len(states(browser).get("ready", [])) == 3, 60, "three ready workers")
        assert "daskinfer" in browser.find_element("css selector", ".navbar").text.lower()

        moved = [browser.execute_script(POINTS, name) for name in ("throughput", "use", "memory")]
        canvases = browser.execute_script(DRAWN)
        wait_until(lambda: browser.execute_script(POINTS, "throughput") > moved[0] + 2, 60, "more points")
        wait_until(lambda: browser.execute_script(DRAWN) != canvases, 30, "other pictures")
        wait_until(lambda: browser.execute_script(POINTS, "steps") > 0, 30, "the histogram of steps")

        picture(browser, "dashboard")

        killed = states(browser)["ready"][0]
        kill(own_cluster, killed)
        wait_until(
            lambda: killed in [a for s in ("dead", "replaced") for a in states(browser).get(s, [])], 60, "a dead one"
        )
        wait_until(lambda: killed in states(browser).get("replaced", []), 90, "its successor")
        wait_until(lambda: len(states(browser).get("ready", [])) == 3, 90, "three ready workers again")
        screen(browser, 1280, 800, dark=True)
        picture(browser, "dashboard-dark")
        screen(browser, 390, 844, phone=True)
        picture(browser, "dashboard-phone")
        screen(browser, 1280, 800)
        run.join(100)
        (report,) = reports
        wait_until(lambda: "done after" in figure(browser, "eta"), 60, "the end")
        job = told(own_cluster)["jobs"][0]["snapshot"]
        assert figure(browser, "finished") == f"{job['done']:,}" == f"{report.rows:,}"
        assert figure(browser, "failed") == f"{job['failed']:,}" == f"{report.failed:,}"
        assert figure(browser, "retried") == f"{job['retried']:,}" == f"{report.retried:,}"
        assert report.failed == sum(text.startswith("bad") for text in texts)
        assert len(pd.read_parquet(tmp_path / "answers")) == report.rows == ROWS
    assert errors(browser) == []


def kill(cluster: LocalCluster, address: str) -> None:
    """Kill a worker's process as the system would."""
    nanny = next(w for w in cluster.workers.values() if w.worker_address == address)
    psutil.Process(nanny.pid).kill()


@pytest.mark.parametrize("part", ["summary", "throughput", "workers", "use", "steps", "memory", "failures", "jobs"])
def test_each_part_has_a_page_of_its_own(cluster: LocalCluster, browser: Any, part: str) -> None:
    with Driver(echo_spec(prefix=part), cluster=cluster) as driver:
        driver.generate(["a", "b"])
        browser.get(cluster.dashboard_link.replace("/status", f"/individual-daskinfer-{part}"))
        wait_until(lambda: browser.execute_script("return Bokeh.documents.length"), 20, "a document")
        assert browser.execute_script("return Bokeh.documents[0].roots().length") == 1
    assert errors(browser) == []
