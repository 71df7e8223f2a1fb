"""The flow started from Prefect's run form in a real browser, and its artifacts opened there."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tasks.run_records import load_run
from tests.flows.installation import Installation, Kills
from tests.flows.prefect_pages import submit
from tests.flows.prefect_server import prefect_api
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


class Prefect:
    """The pages and the API of the installation's server."""

    def __init__(self, installation: Installation) -> None:
        self.pages = f"http://127.0.0.1:{installation.ports.prefect}"
        self.api = prefect_api(self.pages)

    def deployment(self) -> dict[str, Any]:
        return dict(self.api.get("/deployments/name/retrain-drafter/retrain-drafter").json())

    def open_run_form(self, page: Page) -> None:
        page.goto(f"{self.pages}/deployments/deployment/{self.deployment()['id']}/run")
        expect(page.get_by_role("button", name="Submit")).to_be_visible()

    def submit(self, page: Page) -> str:
        """Return the id of the flow run that the form makes."""
        return str(submit(page, page, "/create_flow_run").json()["id"])

    def wait_for_end(self, flow_run: str) -> dict[str, Any]:
        """The flow run, once its state is final."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            run = dict(self.api.get(f"/flow_runs/{flow_run}").json())
            if run["state"]["type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED"):
                return run
            assert time.monotonic() < deadline, run["state"]
            time.sleep(1)


@pytest.fixture
def prefect(installation: Installation) -> Prefect:
    return Prefect(installation)


def test_the_schedule_is_there_and_paused(prefect: Prefect) -> None:
    deployment = prefect.deployment()

    assert [(s["schedule"]["cron"], s["active"]) for s in deployment["schedules"]] == [("0 3 * * *", False)]
    assert deployment["work_pool_name"] == "fledge"


def test_a_form_filled_in_wrong_fails_with_what_to_do(
    prefect: Prefect, page: Page, screenshots: Path
) -> None:
    prefect.open_run_form(page)
    page.screenshot(path=screenshots / "1-run-form.png", full_page=True)
    expect(page.get_by_text("Conversations to learn from and to measure with")).to_be_visible()
    page.locator("textarea").first.fill("/nowhere/chats.jsonl")

    run = prefect.wait_for_end(prefect.submit(page))

    assert run["state"]["type"] == "FAILED"
    assert "source /nowhere/chats.jsonl: nothing there" in run["state"]["message"]
    assert "what to do: check the path" in run["state"]["message"]
    page.goto(f"{prefect.pages}/runs/flow-run/{run['id']}")
    expect(page.get_by_text("nothing there").first).to_be_visible()
    page.screenshot(path=screenshots / "2-failed-run.png", full_page=True)


def test_a_run_from_the_form_ends_in_artifacts_that_open(
    kills: Kills, installation: Installation, prefect: Prefect, page: Page, screenshots: Path
) -> None:
    prefect.open_run_form(page)
    page.get_by_text("Parameters", exact=True).locator("xpath=..").locator("button").first.click()
    page.get_by_text("Use JSON input").locator("visible=true").first.click()
    page.locator("textarea.p-code-input__textarea").fill(json.dumps({"settings": installation.settings}))

    run = prefect.wait_for_end(prefect.submit(page))

    assert run["state"]["type"] == "COMPLETED", run["state"]["message"]
    record = load_run(installation.places, run["id"])
    assert record.registry_uri == kills.record.registry_uri

    page.goto(f"{prefect.pages}/runs/flow-run/{run['id']}")
    page.get_by_role("tab", name="Artifacts").or_(page.get_by_text("Artifacts", exact=True)).first.click()
    for name in ("decision", "cells", "report", "validation", "mlflow-version"):
        expect(page.get_by_text(name, exact=True).first).to_be_visible()
    page.screenshot(path=screenshots / "3-artifacts.png", full_page=True)

    links = _open_decision_and_links(prefect, page, run["id"], screenshots)
    _open_pages(page, links, record.registry_uri, screenshots)


def _open_decision_and_links(
    prefect: Prefect, page: Page, flow_run: str, screenshots: Path
) -> dict[str, str]:
    """Open the decision and the table; return where the link artifacts lead."""
    found = prefect.api.post(
        "/artifacts/filter", json={"artifacts": {"flow_run_id": {"any_": [flow_run]}}}
    ).json()
    artifacts = {artifact["key"]: artifact for artifact in found if artifact["key"]}
    for name, text in (("decision", "Approved"), ("cells", "no speculation")):
        page.goto(f"{prefect.pages}/artifacts/artifact/{artifacts[name]['id']}")
        expect(page.get_by_text(text).first).to_be_visible()
        page.screenshot(path=screenshots / f"4-{name}.png", full_page=True)
    return {
        name: artifacts[name]["data"].partition("](")[2].rstrip(")")
        for name in ("report", "validation", "mlflow-version")
    }


def _open_pages(page: Page, links: dict[str, str], registry_uri: str, screenshots: Path) -> None:
    """Follow the links as a person would: each leads to a page that shows what it promises."""
    expected = {
        "report": "cceptance",
        "validation": "num_empty_turns",
        "mlflow-version": registry_uri.rpartition("/")[2],
    }
    for name, text in expected.items():
        answer = page.goto(links[name])
        assert answer is not None
        assert answer.ok
        expect(page.get_by_text(text).filter(visible=True).first).to_be_visible()
        page.wait_for_timeout(1000)
        page.screenshot(path=screenshots / f"5-{name}.png", full_page=True)
