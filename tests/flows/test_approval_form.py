"""The approval form filled in by a real browser: what it shows, what it refuses, and that it is answered."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect

from tasks.promotion import require_approved
from tasks.settings import Places
from tests.flows.approval_installation import ApprovalInstallation, approval_installation
from tests.flows.conftest import free_port
from tests.flows.prefect_pages import submit
from tests.tasks.registered_versions import register_version

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def prefect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApprovalInstallation]:
    home = tmp_path_factory.mktemp("approval-form")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("FLEDGE_MLFLOW_TRACKING_URI", raising=False)
        patch.setenv("FLEDGE_HOME", str(home))
        with approval_installation(home, free_port()) as installation:
            yield installation


def choose(page: Page, form: Locator, label: str, option: str) -> None:
    """Pick an option of a list in the form."""
    field = form.locator(".p-label", has_text=label).first
    # Opened by key: a click opens the list and closes it at once when the page is slow.
    field.locator(".p-select-button__control").first.press("ArrowDown")
    page.locator(".p-select-option", has_text=option).first.click()
    expect(field.locator(".p-select-button__value")).to_have_text(option)


def test_a_person_approves_a_version_in_the_browser(
    prefect: ApprovalInstallation, page: Page, tmp_path: Path, screenshots: Path
) -> None:
    version = register_version(Places(), tmp_path)
    run = prefect.promote(version.version)
    prefect.wait_for_form(run)

    page.goto(f"{prefect.url}/runs/flow-run/{run}")
    page.get_by_role("button", name="Resume").first.click()
    form = page.locator(".p-modal").first
    expect(form.get_by_text("into production?")).to_be_visible()
    expect(form.get_by_text("1.86 (1.76 to 1.96)")).to_be_visible()
    expect(form.get_by_role("link", name="Report")).to_have_attribute("href", str(version.report))
    page.screenshot(path=screenshots / "6-approval-form.png", full_page=True)
    form.get_by_text("makes the answer void").scroll_into_view_if_needed()
    page.screenshot(path=screenshots / "7-approval-form-end-of-text.png", full_page=True)

    choose(page, form, "Decision", "approve")
    choose(page, form, "Approver", "alice")
    submit(page, form, "/schemas/validate")
    page.wait_for_timeout(3000)  # the run would go on by now
    assert prefect.run(run)["state"]["name"] == "Suspended", "a form without a reason is refused"
    page.screenshot(path=screenshots / "8-approval-form-without-reason.png", full_page=True)

    form.locator(".p-label", has_text="Reason").locator("input, textarea").first.fill("better on code")
    page.screenshot(path=screenshots / "9-approval-form-filled-in.png", full_page=True)
    submit(page, form, "/resume")

    assert prefect.wait_for_end(run)["name"] == "Completed"
    approval = require_approved(version.version).approval
    assert approval is not None
    assert (approval.approver, approval.reason, approval.flow_run) == ("alice", "better on code", run)
    page.reload()
    expect(page.get_by_text("Completed").first).to_be_visible()
    page.screenshot(path=screenshots / "10-approved-run.png", full_page=True)
