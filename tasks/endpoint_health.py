"""What is known of an endpoint's last windows: CloudWatch's figures, and production's own captured answers.

Captured answers tell the acceptance of the traffic itself, whatever it is about. Probes ask what the drafter
learned; they stand in where nothing, or too little, is captured.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.events import emit_event

from tasks.aws import Aws, connect_aws
from tasks.build_endpoint import METRICS, SERVED_NAME_TAG, VARIANT, VERSION_TAG
from tasks.endpoints import Endpoint, find_config, read_tags, require_endpoint
from tasks.logs import flow_logger
from tasks.monitor_settings import MonitorSettings
from tasks.monitoring import Expectation, History, MonitorDecision, Window
from tasks.probe import Prober, choose_prompts
from tasks.promotion import list_versions, read_version, record_retrain_asked
from tasks.served_answers import ServedAnswer, captures, mean_acceptance, read_served_answers
from tasks.settings import Places
from tasks.version_record import VersionRecord

STALE_EVENT = "fledge.drafter.stale"
# Rows of bad windows may have gaps; how far back a row may begin, as a multiple of its length.
_LOOK_BACK = 3


class Fleet:
    """What serves: the endpoint, the version behind it, the name that its answers carry, and its server's K."""

    def __init__(self, endpoint: Endpoint, version: VersionRecord, served_name: str, k: int | None) -> None:
        self.endpoint = endpoint
        self.version = version
        self.served_name = served_name
        self.k = k


def find_fleet(endpoint: Endpoint) -> Fleet | None:
    """The version that an endpoint serves; None: the config is not one of ours."""
    aws = connect_aws(Places())
    config = find_config(aws, endpoint.config_name)
    tags = read_tags(aws, config["EndpointConfigArn"]) if config else {}
    if config is None or VERSION_TAG not in tags or SERVED_NAME_TAG not in tags:
        return None
    model = aws.sagemaker.describe_model(ModelName=config["ProductionVariants"][0]["ModelName"])
    environment = model.get("PrimaryContainer", {}).get("Environment", {})
    speculation = json.loads(environment.get("SM_VLLM_SPECULATIVE_CONFIG", "{}"))
    k = speculation.get("num_speculative_tokens")
    return Fleet(endpoint, read_version(tags[VERSION_TAG]), tags[SERVED_NAME_TAG], k)


def look_at(endpoint_name: str) -> Endpoint:
    """The endpoint with its tags.

    Raises:
        EndpointError: there is none.
    """
    return require_endpoint(connect_aws(Places()), endpoint_name)


def expectation_of(version: VersionRecord, k: int | None) -> Expectation:
    """The lowest figures of the domains that it learned: a mix of them can be that low without being worn."""
    acceptance, speed = version.acceptance_of(k=k), version.speed_of(k=k)
    domains = version.train_domains or tuple(acceptance)
    lengths = [acceptance[domain].acceptance_length for domain in domains if domain in acceptance]
    speeds = [speed[domain].output_tokens_per_second for domain in domains if domain in speed]
    return Expectation(
        acceptance_length=min(lengths, default=None), output_tokens_per_second=min(speeds, default=None)
    )


def history_of(fleet: Fleet) -> History:
    """What has been done, and whether there is something to go back to."""
    version = fleet.version
    asked = [one.retrain_asked_at for one in list_versions() if one.retrain_asked_at is not None]
    return History(
        restored_at=version.restored_at,
        retrain_asked_at=max(asked, default=None),
        previous_version=version.previous_champion,
        obstacle=_obstacle(fleet),
    )


def _obstacle(fleet: Fleet) -> str | None:
    version = fleet.version
    if version.champion != version.version:
        return f"version {version.version} serves, but the champion is {version.champion or 'none'}"
    if version.previous_champion is None or fleet.endpoint.previous_config_name is None:
        return "nothing served before it that is known"
    before = read_version(version.previous_champion)
    if before.rolled_back_at is not None:
        return (
            f"version {before.version}, which served before, was taken back itself: {before.rollback_reason}"
        )
    return None


@task(name="probe-endpoint", cache_policy=NO_CACHE, timeout_seconds=600)
def probe_endpoint(fleet: Fleet, settings: MonitorSettings) -> None:
    """Some chats, whose figures go to CloudWatch."""
    if not settings.num_probes:
        return
    places = Places()
    k = fleet.k or fleet.version.num_speculative_tokens or 1
    chosen = choose_prompts(places, settings.probe, fleet.version, k)
    prober = Prober(connect_aws(places), fleet.endpoint.name, chosen.prompts, settings.probe)
    for index in range(settings.num_probes):
        prober.probe(chosen.prompts[index % len(chosen.prompts)])
    if not chosen.comparable:
        flow_logger().warning(
            "the probes are general questions, for which no acceptance was measured; set `probe.prompts`, "
            "or capture traffic, so that acceptance can be judged"
        )


@task(name="read-windows", cache_policy=NO_CACHE, retries=2, retry_delay_seconds=5, timeout_seconds=600)
def read_windows(fleet: Fleet, settings: MonitorSettings, now: datetime) -> tuple[Window, ...]:
    """The last whole windows of the version that serves, since it does; oldest first."""
    places = Places()
    aws = connect_aws(places)
    starts = window_starts(settings, fleet.version.in_production_since, now)
    if not starts:
        return ()
    length = timedelta(seconds=settings.window_s)
    end = starts[-1] + length
    limit = settings.max_captured_answers * len(starts)
    answers = read_served_answers(aws, fleet.endpoint, starts[0], end, limit)
    answers = [answer for answer in answers if answer.served_name == fleet.served_name]
    figures = _figures(aws, fleet, starts[0], end, settings.window_s)
    if (
        captures(fleet.endpoint)
        and not answers
        and _total(figures, "requests") > _total(figures, "num_speed")
    ):
        flow_logger().warning(
            "captured answers of %s tell no acceptance, so probes stand in, which ask what the drafter knows: "
            "streams tell it only where the client asks for usage, or the deployment's environment sets "
            "SM_VLLM_ENABLE_FORCE_INCLUDE_USAGE=true",
            fleet.endpoint.name,
        )
    comparable = choose_prompts(places, settings.probe, fleet.version, fleet.k or 1).comparable
    return tuple(
        _window(start, start + length, answers, figures, settings.thresholds.min_answers, comparable)
        for start in starts
    )


def window_starts(
    settings: MonitorSettings, in_production_since: datetime | None, now: datetime
) -> list[datetime]:
    """Starts of the whole, settled windows to look at, on multiples of their length; oldest first.

    A window in which the version came to serve would show the fleet of before: it is left out.
    """
    length = settings.window_s
    end_s = int(now.timestamp() - settings.settle_s) // length * length
    count = _LOOK_BACK * settings.thresholds.num_bad_windows
    starts = [datetime.fromtimestamp(end_s - index * length, UTC) for index in range(count, 0, -1)]
    return [start for start in starts if in_production_since is None or start >= in_production_since]


def _window(
    start: datetime,
    end: datetime,
    answers: Sequence[ServedAnswer],
    figures: dict[str, dict[datetime, float]],
    min_answers: int,
    comparable: bool,
) -> Window:
    def figure(name: str) -> float | None:
        return figures[name].get(start)

    inside = [answer for answer in answers if start <= answer.at < end]
    acceptance, source, count = mean_acceptance(inside), "traffic", len(inside)
    if len(inside) < min_answers or acceptance is None:
        acceptance = figure("acceptance") if comparable else None
        source, count = "probes", int(figure("num_acceptance") or 0)
    return Window.model_validate(
        {
            "started_at": start,
            "ended_at": end,
            "acceptance_length": acceptance,
            "acceptance_from": None if acceptance is None else source,
            "num_answers": 0 if acceptance is None else count,
            "output_tokens_per_second": figure("speed"),
            "num_probes": int(figure("num_speed") or 0),
            "num_requests": int(figure("requests") or 0),
            "num_failed": int(figure("failed") or 0),
        }
    )


def _figures(
    aws: Aws, fleet: Fleet, start: datetime, end: datetime, period_s: int
) -> dict[str, dict[datetime, float]]:
    """CloudWatch's figures by name and start of window."""
    ours = {"EndpointName": fleet.endpoint.name, "DrafterVersion": fleet.served_name}
    theirs = {
        "EndpointName": fleet.endpoint.name,
        "VariantName": VARIANT,
        "EndpointConfigName": fleet.endpoint.config_name,
    }
    wanted = {
        "acceptance": (METRICS, "AcceptanceLength", ours, "Average"),
        "num_acceptance": (METRICS, "AcceptanceLength", ours, "SampleCount"),
        "speed": (METRICS, "OutputTokensPerSecond", ours, "Average"),
        "num_speed": (METRICS, "OutputTokensPerSecond", ours, "SampleCount"),
        "requests": ("AWS/SageMaker", "Invocations", theirs, "Sum"),
        "failed": ("AWS/SageMaker", "Invocation5XXErrors", theirs, "Sum"),
    }
    found: dict[str, dict[datetime, float]] = {name: {} for name in wanted}
    queries = [_query(name, *query, period_s) for name, query in wanted.items()]
    pages = aws.cloudwatch.pages(
        "get_metric_data",
        MetricDataQueries=queries,
        StartTime=start,
        EndTime=end,
        ScanBy="TimestampAscending",
    )
    for page in pages:
        for result in page["MetricDataResults"]:
            for at, value in zip(result["Timestamps"], result["Values"], strict=True):
                found[result["Id"]][at.astimezone(UTC)] = value
    return found


def _total(figures: dict[str, dict[datetime, float]], name: str) -> float:
    return sum(figures[name].values())


def _query(
    name: str, namespace: str, metric: str, dimensions: dict[str, str], statistic: str, period_s: int
) -> dict[str, Any]:
    return {
        "Id": name,
        "MetricStat": {
            "Metric": {
                "Namespace": namespace,
                "MetricName": metric,
                "Dimensions": [{"Name": key, "Value": value} for key, value in dimensions.items()],
            },
            "Period": period_s,
            "Stat": statistic,
        },
    }


@task(name="ask-for-retrain", cache_policy=NO_CACHE, retries=2, retry_delay_seconds=5, timeout_seconds=300)
def ask_for_retrain(fleet: Fleet, decision: MonitorDecision, newest: Window) -> None:
    """Emit the event that prefect.yaml starts a retrain on, and remember on the version that it was asked for.

    Killed between the two, the next run asks again: an event of the same id, and a retrain on the same data
    trains nothing twice.
    """
    version = fleet.version
    emit_event(
        event=STALE_EVENT,
        resource={
            "prefect.resource.id": f"fledge.drafter.{version.name}.{version.version}",
            "prefect.resource.name": version.uri,
        },
        payload={
            "version": version.version,
            "endpoint": fleet.endpoint.name,
            "reasons": list(decision.reasons),
            "captures": (fleet.endpoint.description.get("DataCaptureConfig") or {}).get("DestinationS3Uri"),
        },
        id=uuid.uuid5(uuid.NAMESPACE_URL, f"{version.uri}#{newest.started_at.isoformat()}"),
    )
    record_retrain_asked.fn(version.version)


def show_health(
    fleet: Fleet, windows: Sequence[Window], expected: Expectation, decision: MonitorDecision
) -> None:
    """The run's page: what was decided, and every window behind it."""
    create_markdown_artifact(
        key="endpoint-health",
        markdown=health_markdown(fleet.endpoint.name, fleet.version, windows, expected, decision),
        description=f"{fleet.endpoint.name}: {decision.action}",
    )
    log = flow_logger().info if decision.action == "ok" else flow_logger().warning
    log("%s, %s: %s", fleet.endpoint.name, decision.action, "; ".join(decision.reasons))


def health_markdown(
    endpoint_name: str,
    version: VersionRecord,
    windows: Sequence[Window],
    expected: Expectation,
    decision: MonitorDecision,
) -> str:
    """Decision and windows as a page of its own."""
    lines = [f"# {endpoint_name} on `{version.uri}`: {decision.action.replace('_', ' ')}", ""]
    lines += [f"- {reason}" for reason in decision.reasons]
    lines += [
        "",
        f"Its evaluation: acceptance length {_number(expected.acceptance_length, 2)}, "
        f"{_number(expected.output_tokens_per_second, 0)} output tokens/s.",
        "",
        "| window (UTC) | acceptance length | from | answers | probes' tokens/s | requests | failed |",
        "|---|--:|---|--:|--:|--:|--:|",
    ]
    for window in reversed(windows):
        lines.append(
            f"| {window.started_at:%m-%d %H:%M:%S} | {_number(window.acceptance_length, 2)} "
            f"| {window.acceptance_from or ''} | {window.num_answers or ''} "
            f"| {_number(window.output_tokens_per_second, 0)} | {window.num_requests} | {window.num_failed} |"
        )
    return "\n".join(lines)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
