"""Is an endpoint still what its drafter's evaluation promised? On a schedule; remembers nothing itself.

What it knows stands in CloudWatch, in S3, in the registry and on the endpoint. So a run that was killed is
made good by the next one, and two runs within one window decide the same.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

from prefect import flow

from drafter.records import Record
from flows.roll_back_endpoint import roll_back_endpoint
from tasks.endpoint_health import (
    Fleet,
    ask_for_retrain,
    expectation_of,
    find_fleet,
    history_of,
    look_at,
    probe_endpoint,
    read_windows,
    show_health,
)
from tasks.endpoint_settings import RollBackSettings
from tasks.endpoints import Endpoint
from tasks.logs import flow_logger, quiet_user_errors
from tasks.monitor_settings import MonitorSettings
from tasks.monitoring import MonitorDecision, Window, decide_action
from tasks.roll_back import BACK_FROM_TAG


class MonitorRecord(Record):
    """What one look at an endpoint came to."""

    endpoint_name: str
    version: str | None
    outcome: Literal["ok", "watch", "ask_retrain", "roll_back", "not_judged"]
    reasons: tuple[str, ...]
    windows: tuple[Window, ...]


@flow(
    name="monitor-endpoint",
    description="Compare an endpoint with what its drafter's evaluation promised; ask for a retrain or go back.",
    validate_parameters=True,
)
def monitor_endpoint(settings: MonitorSettings = MonitorSettings()) -> MonitorRecord:  # noqa: B008 - frozen
    """Compare an endpoint with what its drafter's evaluation promised; ask for a retrain or go back."""
    quiet_user_errors()
    endpoint = look_at(settings.endpoint_name)
    if endpoint.busy:
        return not_judged(settings, f"the endpoint is {endpoint.status}: alarms watch it meanwhile")
    if endpoint.tags.get(BACK_FROM_TAG):
        return complete_rollback(settings, endpoint)
    fleet = find_fleet(endpoint)
    if fleet is None:
        return not_judged(settings, f"config {endpoint.config_name} is not one that Fledge has made")
    now = datetime.now(UTC)
    probe_endpoint(fleet, settings)
    windows = read_windows(fleet, settings, now)
    expected = expectation_of(fleet.version, fleet.k)
    decision = decide_action(windows, expected, history_of(fleet), settings.thresholds, now)
    show_health(fleet, windows, expected, decision)
    if settings.act:
        act(fleet, decision, windows)
    return MonitorRecord(
        endpoint_name=settings.endpoint_name,
        version=fleet.version.version,
        outcome=decision.action,
        reasons=decision.reasons,
        windows=windows,
    )


def act(fleet: Fleet, decision: MonitorDecision, windows: tuple[Window, ...]) -> None:
    """Do what was decided. Asked first: killed before the rollback, the next run still rolls back."""
    if decision.asks_retrain:
        ask_for_retrain(fleet, decision, windows[-1])
    if decision.action == "roll_back":
        roll_back_endpoint(
            RollBackSettings(endpoint_name=fleet.endpoint.name, reason="; ".join(decision.reasons))
        )


def complete_rollback(settings: MonitorSettings, endpoint: Endpoint) -> MonitorRecord:
    """Finish a rollback that was killed: traffic first, then tags and aliases."""
    reason = f"a rollback from {endpoint.tags[BACK_FROM_TAG]} was interrupted, and the monitor completed it"
    if settings.act:
        roll_back_endpoint(RollBackSettings(endpoint_name=endpoint.name, reason=reason))
    return not_judged(settings, reason)


def not_judged(settings: MonitorSettings, reason: str) -> MonitorRecord:
    """Nothing to compare this time."""
    flow_logger().info("%s: %s", settings.endpoint_name, reason)
    return MonitorRecord(
        endpoint_name=settings.endpoint_name,
        version=None,
        outcome="not_judged",
        reasons=(reason,),
        windows=(),
    )


if __name__ == "__main__":
    monitor_endpoint()
