"""`fledge` verbs around an endpoint, run as a user runs them: in another terminal than `fledge up`."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from flows.endpoint_commands import how_to_go_on
from tasks.local_environment import Ports, announced, only_one
from tasks.settings import Places
from tests.containers.control_plane import VARIANT, ControlPlane, ask, steady_load
from tests.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[2]
ENDPOINT = "birds"
SERVED = "fledge-drafter-v7"


class Terminal:
    """A terminal of its own on the home of a running `fledge up`."""

    def __init__(self, plane: ControlPlane, home: Path) -> None:
        self.plane = plane
        self.home = home
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "FLEDGE_"))}
        self.environment = {**kept, "FLEDGE_HOME": str(home), "COLUMNS": "160"}

    def run(self, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments), cwd=ROOT, env=self.environment, text=True, capture_output=True,
            input=stdin, stdin=subprocess.DEVNULL if stdin is None else None, timeout=PATIENCE_S,
        )  # fmt: skip

    def json(self, *arguments: str) -> object:
        done = self.run(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def type(self, *arguments: str, waits_for: str, keys: str) -> tuple[int, str]:
        """Run at a terminal, and type once it shows what it waits for; exit code and what was on the screen."""
        leader, follower = pty.openpty()
        process = subprocess.Popen(
            self.command(*arguments), cwd=ROOT, env=self.environment, stdin=follower, stdout=follower,
            stderr=follower, start_new_session=True,
        )  # fmt: skip
        os.close(follower)
        screen, deadline = "", time.monotonic() + PATIENCE_S
        for key in keys.splitlines(keepends=True):
            seen = len(screen)
            while waits_for not in screen[seen:]:
                assert time.monotonic() < deadline, screen
                screen += _read(leader)
            os.write(leader, key.encode())
        while process.poll() is None:
            assert time.monotonic() < deadline, screen
            screen += _read(leader)
        return process.returncode, screen + _read(leader)

    @staticmethod
    def command(*arguments: str) -> list[str]:
        return [sys.executable, "-m", "flows.command_line", *arguments]


def _read(leader: int) -> str:
    if not select.select([leader], [], [], 0.2)[0]:
        return ""
    try:
        return os.read(leader, 65536).decode(errors="replace")
    except OSError:  # the other side is closed
        return ""


@pytest.fixture(scope="module")
def terminal(moto: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    """An endpoint in service on this machine, and the addresses where `fledge up` would have written them."""
    home = tmp_path_factory.mktemp("home")
    plane = ControlPlane(home, moto)
    plane.start()
    make_config(plane, "birds-v7-0123abcd", version="7")
    plane.create_endpoint(ENDPOINT, "birds-v7-0123abcd")
    aws, sagemaker = urlsplit(moto).port, urlsplit(plane.url).port
    assert aws is not None
    assert sagemaker is not None
    places = Places(home=home, region="us-east-1")
    with only_one(places), announced(places, Ports(1, 2, 3, aws=aws, sagemaker=sagemaker)):
        yield Terminal(plane, home)
    plane.close()


def make_config(plane: ControlPlane, name: str, version: str) -> None:
    """A config with Fledge's tags, whose fleet answers under the version's name."""
    plane.create_config(name, {"SM_VLLM_SERVED_MODEL_NAME": f"fledge-drafter-v{version}"})
    arn = plane.sagemaker.describe_endpoint_config(EndpointConfigName=name)["EndpointConfigArn"]
    tags = {"fledge.version": version, "fledge.served_name": f"fledge-drafter-v{version}"}
    plane.sagemaker.add_tags(
        ResourceArn=arn, Tags=[{"Key": key, "Value": value} for key, value in tags.items()]
    )


@pytest.mark.slow
class TestVerbs:
    """One endpoint for all of them."""

    def test_status_shows_version_instances_and_that_the_price_is_unknown(self, terminal: Terminal) -> None:
        done = terminal.run("status")
        assert done.returncode == 0, done.stderr
        assert done.stderr == "on this machine (fledge up)\n"
        line = next(line for line in done.stdout.splitlines() if ENDPOINT in line)
        for part in ("InService", SERVED, "all", "1 x ml.g7e.2xlarge", "unknown", "birds-v7-0123abcd"):
            assert part in line
        assert "what they cost is unknown" in done.stdout

    def test_status_as_json_is_for_scripts(self, terminal: Terminal) -> None:
        (status,) = terminal.json("status", ENDPOINT)  # type: ignore[misc]
        assert (status["status"], status["usd_per_hour"]) == ("InService", None)
        (fleet,) = status["fleets"]
        assert (fleet["version"], fleet["config_name"]) == ("7", "birds-v7-0123abcd")

    def test_an_unknown_endpoint_is_an_error_that_names_those_there_are(self, terminal: Terminal) -> None:
        done = terminal.run("status", "bees")
        assert done.returncode == 1
        assert f"one of: {ENDPOINT}" in done.stderr
        assert "Traceback" not in done.stderr

    def test_one_question_is_answered_with_its_figures(self, terminal: Terminal) -> None:
        done = terminal.run("chat", ENDPOINT, "What has the bird done?")
        assert done.stdout == "The bird has fledged.\n"
        said = done.stderr.splitlines()[-1]
        assert re.fullmatch(
            rf"\[{SERVED}: \d+\.\d\d s \(first token \d+\.\d\d s\), 5 tokens, \d+ tokens/s, "
            r"acceptance length 2\.00\]",
            said,
        ), said

    def test_a_question_may_come_through_a_pipe_and_an_empty_one_is_refused(self, terminal: Terminal) -> None:
        assert terminal.run("chat", ENDPOINT, stdin="What has it done?").stdout == "The bird has fledged.\n"
        empty = terminal.run("chat", ENDPOINT, stdin="")
        assert empty.returncode == 1
        assert "an empty question" in empty.stderr

    def test_answers_as_json(self, terminal: Terminal) -> None:
        (answer,) = terminal.json("chat", ENDPOINT, "Well?")  # type: ignore[misc]
        assert answer["text"] == "The bird has fledged."
        assert (answer["served_name"], answer["acceptance_length"]) == (SERVED, 2.0)

    def test_a_conversation_at_a_prompt(self, terminal: Terminal) -> None:
        code, screen = terminal.type(
            "chat", ENDPOINT, waits_for="> ", keys="What has it done?\n/new\nAnd now?\n/quit\n"
        )
        assert code == 0
        assert screen.count("The bird has fledged.") == 2
        assert screen.count("acceptance length 2.00") == 2

    def test_chatting_with_nobody_is_an_error_without_traceback(self, terminal: Terminal) -> None:
        done = terminal.run("chat", "bees", "Anybody?")
        assert done.returncode == 1
        assert "bees" in done.stderr
        assert "what to do:" in done.stderr
        assert "Traceback" not in done.stderr

    def test_logs_are_those_of_the_instances(self, terminal: Terminal) -> None:
        done = terminal.run("logs", ENDPOINT)
        assert done.returncode == 0, done.stderr
        assert "arguments:" in done.stdout
        assert SERVED in done.stdout

    def test_a_config_that_somebody_deleted_does_not_hide_the_endpoint(self, terminal: Terminal) -> None:
        plane = terminal.plane
        make_config(plane, "wasps-v1-0123abcd", version="1")
        plane.create_endpoint("wasps", "wasps-v1-0123abcd")
        plane.sagemaker.delete_endpoint_config(EndpointConfigName="wasps-v1-0123abcd")
        (status,) = terminal.json("status", "wasps")  # type: ignore[misc]
        (fleet,) = status["fleets"]
        assert (fleet["version"], fleet["instance_count"], fleet["usd_per_hour"]) == (None, 1, None)
        assert "not deployed by Fledge" in terminal.run("status", "wasps").stdout
        plane.sagemaker.delete_endpoint(EndpointName="wasps")

    def test_an_update_shows_both_fleets_and_what_each_really_got(self, terminal: Terminal) -> None:
        plane = terminal.plane
        make_config(plane, "birds-v8-0123abcd", version="8")
        canary = {
            "Type": "CANARY",
            "CanarySize": {"Type": "CAPACITY_PERCENT", "Value": 50},
            "WaitIntervalInSeconds": 900,  # longer than any machine needs for what follows
        }
        plane.sagemaker.update_endpoint(
            EndpointName=ENDPOINT,
            EndpointConfigName="birds-v8-0123abcd",
            DeploymentConfig={"BlueGreenUpdatePolicy": {"TrafficRoutingConfiguration": canary}},
        )
        both = {SERVED, "fledge-drafter-v8"}
        wait_until(lambda: {ask(plane.runtime, ENDPOINT) for _ in range(8)} == both)
        with steady_load(plane, ENDPOINT):  # shares are those of the last two minutes
            for _ in range(200):
                ask(plane.runtime, ENDPOINT)
            time.sleep(2.5)  # metrics are published once a second
            (status,) = terminal.json("status", ENDPOINT)  # type: ignore[misc]
            shown = terminal.run("status").stdout
        shares = {fleet["version"]: fleet["share_of_traffic"] for fleet in status["fleets"]}
        assert status["status"] == "Updating"
        assert shares["8"] == pytest.approx(0.5, abs=0.25)
        assert shares["7"] + shares["8"] == pytest.approx(1)
        line = next(line for line in shown.splitlines() if "fledge-drafter-v8" in line)
        (percent,) = re.findall(r"(\d+)%", line)
        assert int(percent) == pytest.approx(100 * shares["8"], abs=10)

    def test_deleting_asks_once_and_no_means_no(self, terminal: Terminal) -> None:
        code, screen = terminal.type("delete", ENDPOINT, waits_for="[y/N] ", keys="n\n")
        assert code == 1
        assert f"{ENDPOINT} is" in screen
        assert screen.count("[y/N]") == 1
        assert "nothing was deleted" in screen
        assert terminal.plane.describe(ENDPOINT)["EndpointStatus"] in ("Updating", "InService")

    def test_deleting_where_nobody_can_answer_needs_yes(self, terminal: Terminal) -> None:
        done = terminal.run("delete", ENDPOINT)
        assert done.returncode == 1
        assert "--yes" in done.stderr


def test_variants_have_the_name_that_deployments_give_them() -> None:
    from tasks import build_endpoint

    assert VARIANT == build_endpoint.VARIANT, "else what these tests look at is not what is deployed"


def test_who_interrupts_the_waiting_is_told_how_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), how_to_go_on("birds"):
        raise KeyboardInterrupt
    assert "fledge status birds" in capsys.readouterr().err
