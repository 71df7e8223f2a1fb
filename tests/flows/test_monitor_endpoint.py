"""The monitor on the SageMaker of this machine: traffic changes its domain, an endpoint goes back, once."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import pytest
from prefect.client.orchestration import get_client

from flows.deploy_endpoint import deploy_endpoint
from flows.monitor_endpoint import MonitorRecord, monitor_endpoint
from tasks.aws import connect_aws
from tasks.endpoint_settings import CaptureSettings, ProbeSettings
from tasks.endpoints import require_endpoint, write_tags
from tasks.monitor_settings import MonitorSettings, MonitorThresholds
from tasks.promotion import read_version
from tasks.roll_back import BACK_FROM_TAG, BACK_TO_TAG
from tasks.version_record import VersionRecord
from tests.flows.endpoint_world import ENDPOINT, EndpointWorld
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.slow

SETTINGS = MonitorSettings(
    endpoint_name=ENDPOINT,
    window_s=10,
    settle_s=5,
    num_probes=2,
    probe=ProbeSettings(prompts=("Fledge?",), max_tokens=8),
    thresholds=MonitorThresholds(num_bad_windows=2, min_answers=3, cool_down_s=600),
)


class Load:
    """A client that asks all the time; what it asks about decides how much of the guesses is accepted."""

    def __init__(self, world: EndpointWorld) -> None:
        self.acceptance_length = 1.86
        self.failures: list[str] = []
        self.num_answered = 0
        self._runtime = world.plane.runtime
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._ask_on, daemon=True)

    def _ask_on(self) -> None:
        index = 0
        while not self._ended.wait(0.4):
            index += 1
            body: dict[str, Any] = {
                "messages": [{"role": "user", "content": "Fledge?"}],
                "fake_acceptance_length": self.acceptance_length,
            }
            try:
                if index % 2:
                    answer = self._runtime.invoke_endpoint(
                        EndpointName=ENDPOINT, ContentType="application/json", Body=json.dumps(body)
                    )
                    answer["Body"].read()
                else:
                    body |= {"stream": True, "stream_options": {"include_usage": True}}
                    answer = self._runtime.invoke_endpoint_with_response_stream(
                        EndpointName=ENDPOINT, ContentType="application/json", Body=json.dumps(body)
                    )
                    list(answer["Body"])
                self.num_answered += 1
            except Exception as error:
                self.failures.append(repr(error))

    @contextmanager
    def running(self) -> Iterator[Load]:
        self._thread.start()
        try:
            yield self
        finally:
            self._ended.set()
            self._thread.join(timeout=PATIENCE_S)


def monitor_until(outcome: str, reached: Any = lambda record: True) -> list[MonitorRecord]:
    """Run the monitor every few seconds until it says so; everything that it said."""
    records: list[MonitorRecord] = []
    deadline = time.monotonic() + PATIENCE_S
    while not (records and records[-1].outcome == outcome and reached(records[-1])):
        assert time.monotonic() < deadline, [(one.outcome, one.reasons) for one in records]
        records.append(monitor_endpoint(SETTINGS))
        time.sleep(2)
    return records


def stale_events(since: datetime) -> list[dict[str, Any]]:
    """The events that ask for a retrain, as Prefect's server has them; it is that of other tests too."""
    occurred = {"since": since.isoformat()}
    wanted = {
        "filter": {"event": {"name": ["fledge.drafter.stale"]}, "occurred": occurred, "order": "ASC"},
        "limit": 50,
    }
    with get_client(sync_client=True) as client:
        return list(client.request("POST", "/events/filter", json=wanted).json()["events"])


@pytest.fixture
def v2(world: EndpointWorld, v1: VersionRecord, tmp_path: Any) -> VersionRecord:
    """The successor in production, its traffic captured."""
    version = world.register(tmp_path, "b")
    deploy_endpoint(world.settings(version, capture=CaptureSettings()))
    return version


def test_traffic_of_another_domain_takes_the_endpoint_back_once_and_asks_for_a_retrain(
    world: EndpointWorld,
    v1: VersionRecord,
    v2: VersionRecord,
) -> None:
    started_at = datetime.now(UTC)
    assert world.champion() == "2"
    with Load(world).running() as load:
        healthy = monitor_until("ok", lambda record: record.windows and record.windows[-1].num_answers >= 3)
        assert healthy[-1].windows[-1].acceptance_from == "traffic"
        assert healthy[-1].windows[-1].acceptance_length == pytest.approx(1.86, abs=0.01)
        for record in healthy:  # a machine that is busy with other tests makes probes slow
            assert record.outcome == "ok" or (
                record.outcome == "watch" and all("(only watched)" in reason for reason in record.reasons)
            ), record.reasons

        load.acceptance_length = 1.09
        changed = monitor_until("roll_back")

        # The window in which the traffic changed holds both kinds: bad enough for a retrain, not yet to go back.
        assert {record.outcome for record in changed[:-1]} <= {"ok", "watch", "ask_retrain"}
        assert "10% of the accepted tokens are left" in changed[-1].reasons[0]
        assert world.champion() == "1"
        assert world.plane.answered_by(ENDPOINT).startswith(f"{v1.served_name}-")
        taken_back = read_version("2")
        assert taken_back.rollback_reason is not None
        assert "its evaluation promised 1.86" in taken_back.rollback_reason
        assert taken_back.retrain_asked_at is not None

        # Version 1 is as bad on that traffic: nothing more is done about it, as often as it is looked at.
        after = [monitor_endpoint(SETTINGS) for _ in range(3)]
        time.sleep(25)
        after += [monitor_endpoint(SETTINGS) for _ in range(2)]
        assert {record.outcome for record in after} <= {"ok", "watch"}
        assert world.champion() == "1"

    assert load.failures == []
    assert load.num_answered > 20
    wait_until(lambda: stale_events(started_at), interval_s=1)
    events = stale_events(started_at)
    assert [event["payload"]["version"] for event in events] == ["2"]
    assert events[0]["resource"]["prefect.resource.id"] == f"fledge.drafter.{v2.name}.2"


def test_a_rollback_that_was_interrupted_is_completed(world: EndpointWorld, v2: VersionRecord) -> None:
    aws = connect_aws(world.places)
    endpoint = require_endpoint(aws, ENDPOINT)
    way = {BACK_FROM_TAG: endpoint.config_name, BACK_TO_TAG: endpoint.previous_config_name or ""}
    write_tags(aws, endpoint.arn, way)

    record = monitor_endpoint(SETTINGS)

    assert record.outcome == "not_judged"
    assert world.champion() == "1"
    assert world.config_name() == way[BACK_TO_TAG]


def test_only_looking_changes_nothing(world: EndpointWorld, v2: VersionRecord) -> None:
    looking = SETTINGS.model_copy(update={"act": False})
    with Load(world).running() as load:
        load.acceptance_length = 1.0
        wait_until(lambda: monitor_endpoint(looking).outcome == "roll_back", interval_s=2)

    assert world.champion() == "2"
    assert read_version("2").retrain_asked_at is None
