"""Prefect's pages, as a person uses them in a browser."""

from __future__ import annotations

from playwright.sync_api import Locator, Page, Response


def submit(page: Page, form: Page | Locator, asks: str) -> Response:
    """Press Submit, and again where the server answers "later", as it does while its SQLite is busy.

    Args:
        form: where the button is.
        asks: part of the address of the request that the form is to send, and of no other.

    Returns:
        What the server answered to that request.
    """

    def tells(answer: Response) -> bool:
        # The server is asked whether the values are valid first: put off, the form sends nothing further.
        return asks in answer.url or (answer.status == 503 and "/schemas/validate" in answer.url)

    while True:
        with page.expect_response(tells) as answered:
            form.get_by_role("button", name="Submit").click()
        if answered.value.status != 503:
            return answered.value
