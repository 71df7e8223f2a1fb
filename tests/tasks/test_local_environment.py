"""What processes are told about the cloud they speak to: this machine's while `fledge up` runs, else AWS."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest

from drafter.errors import ServerError
from tasks.local_environment import (
    LOCAL_ROLE,
    Ports,
    announced,
    environment_defaults,
    find_services,
    only_one,
    service_environment,
    set_environment_defaults,
    use_services,
)
from tasks.settings import Places

ROOT = Path(__file__).parents[2]
PORTS = Ports(1, 2, 3, 4, 5)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """An environment of each test's own, without any cloud in it."""
    before = dict(os.environ)
    for name in before:
        if name.startswith(("AWS_", "FLEDGE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("FLEDGE_HOME", str(tmp_path))
    yield
    os.environ.clear()
    os.environ.update(before)


def test_what_the_environment_says_wins_over_our_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = Places(home=tmp_path)
    monkeypatch.setenv("PREFECT_FLOWS_HEARTBEAT_FREQUENCY", "77")
    environment = service_environment(places, PORTS)
    assert environment["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == "77"
    assert environment["PREFECT_API_URL"] == "http://127.0.0.1:1/api"
    assert environment["FLEDGE_PAGES_URL"] == "http://127.0.0.1:3"
    assert Path(environment_defaults(places)["PREFECT_HOME"]).is_relative_to(tmp_path)


def test_a_home_that_is_not_there_yet_is_made_for_prefect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in environment_defaults(Places()):
        monkeypatch.setenv(name, os.environ.get(name, "kept"))
    monkeypatch.delenv("PREFECT_HOME")
    set_environment_defaults(Places(home=tmp_path / "new" / "home"))
    assert Path(os.environ["PREFECT_HOME"]).is_dir()


def test_verbs_of_other_terminals_speak_to_this_machine_while_up_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "production")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody's")
    monkeypatch.setenv("FLEDGE_BUCKET", "bucket-of-production")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    up = Places(home=Path(os.environ["FLEDGE_HOME"]), bucket="fledge", region="us-east-1")
    with only_one(up), announced(up, PORTS):
        places = use_services()

        assert (places.bucket, places.region, places.execution_role_arn) == (
            "fledge",
            "us-east-1",
            LOCAL_ROLE,
        )
        assert os.environ["AWS_ACCESS_KEY_ID"] == "fledge-local"
        endpoints = {name: boto3.client(name).meta.endpoint_url for name in ("sagemaker", "s3", "cloudwatch")}
        assert endpoints == {
            "sagemaker": "http://127.0.0.1:5",
            "s3": "http://127.0.0.1:4",
            "cloudwatch": "http://127.0.0.1:4",
        }
        assert os.environ["PREFECT_API_URL"] == "http://127.0.0.1:1/api"
    assert capsys.readouterr().err == "on this machine (fledge up)\n"


def test_who_asks_for_aws_gets_aws_and_keeps_the_pipeline(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLEDGE_CLOUD", "aws")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    with only_one(Places()), announced(Places(cloud="auto"), PORTS):
        use_services()
        assert boto3.client("sagemaker").meta.endpoint_url == "https://api.sagemaker.eu-west-1.amazonaws.com"
        assert os.environ["PREFECT_API_URL"] == "http://127.0.0.1:1/api"
    assert capsys.readouterr().err == "on AWS, eu-west-1\n"


def test_up_told_to_leave_endpoints_to_aws_gives_no_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "production")
    environment = service_environment(Places(cloud="aws"), PORTS)
    assert environment["AWS_PROFILE"] == "production"
    assert not [name for name in environment if name.startswith("AWS_ENDPOINT_URL")]


def test_an_account_of_somebody_does_not_reach_the_local_services(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "production")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "secret")
    environment = service_environment(Places(), PORTS)
    assert not {"AWS_PROFILE", "AWS_SESSION_TOKEN"} & environment.keys()
    assert "secret" not in environment.values()


def test_a_killed_up_is_no_longer_spoken_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = """
import os, signal
from tasks.local_environment import Ports, announced, only_one
from tasks.settings import Places
with only_one(Places()), announced(Places(), Ports(1, 2, 3, 4, 5)):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert Places().services_file.exists(), "killed before it could tidy up"
    assert find_services(Places()) is None
    use_services()
    assert "AWS_ENDPOINT_URL_SAGEMAKER" not in os.environ
    with only_one(Places()), announced(Places(), PORTS):
        assert find_services(Places()) is not None


def test_local_without_up_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEDGE_CLOUD", "local")
    with pytest.raises(ServerError, match="start `fledge up`"):
        use_services()


def test_one_up_for_a_home(tmp_path: Path) -> None:
    with only_one(Places()), pytest.raises(ServerError, match="already runs"), only_one(Places()):
        pytest.fail("two at once")


def test_the_local_user_approves_unless_somebody_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "ada")
    assert service_environment(Places(), PORTS)["FLEDGE_APPROVERS"] == "ada"
    monkeypatch.setenv("FLEDGE_APPROVERS", "grace, barbara")
    assert service_environment(Places(), PORTS)["FLEDGE_APPROVERS"] == "grace,barbara"


def test_loopback_is_not_behind_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "intranet.example")
    environment = service_environment(Places(), PORTS)
    assert environment["no_proxy"] == environment["NO_PROXY"] == "intranet.example,127.0.0.1"
