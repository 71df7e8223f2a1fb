"""Where things live, and that no secret of it is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from drafter.errors import FledgeError
from tasks.settings import Places


def test_credentials_of_the_tracking_server_are_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEDGE_MLFLOW_TRACKING_URI", "https://ada:s3cret@mlflow.example/base")
    places = Places()

    shown = [repr(places), str(places), places.model_dump_json(), places.shown_tracking_uri]
    shown.append(places.version_link("7") or "")

    assert places.tracking_uri == "https://ada:s3cret@mlflow.example/base"
    assert not [text for text in shown if "s3cret" in text]
    assert places.version_link("7") == "https://mlflow.example/base/#/models/fledge-drafter/versions/7"


def test_everything_is_below_home_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLEDGE_MLFLOW_TRACKING_URI", raising=False)
    places = Places(home=tmp_path)

    assert places.tracking_uri == f"sqlite:///{tmp_path}/mlflow.db"
    assert places.artifact_location == f"file://{tmp_path}/mlflow-artifacts"
    assert places.version_link("1") is None


def test_links_go_to_the_page_server_where_there_is_one(tmp_path: Path) -> None:
    page = tmp_path / "stages" / "report.html"

    assert Places(home=tmp_path).link(page) == page.as_uri()
    served = Places(home=tmp_path, pages_url="http://127.0.0.1:8000/")
    assert served.link(page) == "http://127.0.0.1:8000/stages/report.html"
    assert served.link(Path("/elsewhere/x.html")) == "file:///elsewhere/x.html"


def test_the_region_is_that_of_every_other_tool_of_aws(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "FLEDGE_REGION"):
        monkeypatch.delenv(name, raising=False)
    assert Places().region == "us-east-1"
    for name in ("FLEDGE_REGION", "AWS_DEFAULT_REGION", "AWS_REGION"):
        monkeypatch.setenv(name, f"of-{name.lower()}")
        assert Places().region == f"of-{name.lower()}"
    assert Places(region="given").region == "given"


def test_approvers_are_separated_by_commas_and_nobody_is_one_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("FLEDGE_APPROVERS", raising=False)
    assert Places().approvers == ()
    monkeypatch.setenv("FLEDGE_APPROVERS", " ada, grace ,,")
    assert Places().approvers == ("ada", "grace")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FLEDGE_BUCKET", "s3://my-bucket"),
        ("FLEDGE_EXECUTION_ROLE_ARN", "fledge-role"),
        ("FLEDGE_CLOUD", "azure"),
    ],
)
def test_a_place_that_cannot_be_one_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(FledgeError, match=name) as error:
        Places()
    assert value in error.value.given
