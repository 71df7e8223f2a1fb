"""How an update moves the traffic, and which alarms move it back: requests for SageMaker and CloudWatch. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.endpoint_settings import MAX_ALARMS, AlarmSettings, EndpointError, RolloutSettings
from tasks.version_record import VersionRecord

VARIANT = "AllTraffic"  # must not change between configs of one endpoint
METRICS = "Fledge"  # CloudWatch namespace of what probes find out


def build_deployment(
    rollout: RolloutSettings, alarms: AlarmSettings, own: tuple[dict[str, Any], ...]
) -> dict[str, Any]:
    """How UpdateEndpoint moves the traffic, and which alarms move it back.

    Raises:
        EndpointError: more alarms than SageMaker takes, or waits that do not fit into the time limit.
    """
    steps = 100 // rollout.percent if rollout.kind == "linear" else 1
    waiting_s = steps * rollout.wait_s + rollout.termination_wait_s
    if waiting_s >= rollout.max_execution_s:
        raise EndpointError(
            f"the rollout waits {waiting_s} s in all, and is given up after {rollout.max_execution_s} s",
            "a time limit above all waits, with room for the new fleet to start",
            "lower wait_s or termination_wait_s, or raise max_execution_s",
        )
    routing: dict[str, Any] = {"Type": rollout.kind.upper(), "WaitIntervalInSeconds": rollout.wait_s}
    size = {"Type": "CAPACITY_PERCENT", "Value": rollout.percent}
    if rollout.kind == "canary":
        routing["CanarySize"] = size
    elif rollout.kind == "linear":
        routing["LinearStepSize"] = size
    names = [*(alarm["AlarmName"] for alarm in own), *alarms.own]
    if len(names) > MAX_ALARMS:
        raise EndpointError(
            f"{len(names)} alarms", f"at most {MAX_ALARMS}, SageMaker's limit", "leave some of alarms.own out"
        )
    deployment: dict[str, Any] = {
        "BlueGreenUpdatePolicy": {
            "TrafficRoutingConfiguration": routing,
            "TerminationWaitInSeconds": rollout.termination_wait_s,
            "MaximumExecutionTimeoutInSeconds": rollout.max_execution_s,
        }
    }
    if names:
        deployment["AutoRollbackConfiguration"] = {"Alarms": [{"AlarmName": name} for name in names]}
    return deployment


def build_alarms(
    alarms: AlarmSettings, names: Mapping[str, str], served_name: str, acceptance_floor: float | None
) -> tuple[dict[str, Any], ...]:
    """PutMetricAlarm requests that watch the new fleet alone: by config, or by the name that answers carry."""
    fleet = {"EndpointName": names["EndpointName"], "VariantName": VARIANT}
    fleet["EndpointConfigName"] = names["EndpointConfigName"]
    drafter = {"EndpointName": names["EndpointName"], "DrafterVersion": served_name}
    sagemaker, ours = "AWS/SageMaker", METRICS
    above, below = "GreaterThanThreshold", "LessThanThreshold"
    latency_us = alarms.max_latency_ms and alarms.max_latency_ms * 1000
    wanted: list[tuple[str, str, str, dict[str, str], str, str, float | None, str]] = [
        ("5xx", sagemaker, "Invocation5XXErrors", fleet, "Sum", above, alarms.max_5xx_errors, "5xx answers"),
        ("model-errors", sagemaker, "InvocationModelErrors", fleet, "Sum", above, alarms.max_model_errors,
         "failed calls of the container"),
        ("latency", sagemaker, "ModelLatency", fleet, "Average", above, latency_us, "model latency (us)"),
        ("slower", ours, "ProbeLatencyRatio", drafter, "Average", above, alarms.max_latency_ratio,
         "latency over that of the fleet beside it"),
        ("acceptance", ours, "AcceptanceLength", drafter, "Average", below, acceptance_floor,
         "acceptance length"),
    ]  # fmt: skip
    return tuple(
        {
            "AlarmName": f"{names['EndpointConfigName']}-{suffix}",
            "AlarmDescription": f"{said} of {served_name} on {names['EndpointName']}",
            "Namespace": namespace,
            "MetricName": metric,
            "Dimensions": [{"Name": name, "Value": value} for name, value in dimensions.items()],
            "Statistic": statistic,
            "Period": alarms.period_s,
            "EvaluationPeriods": alarms.evaluation_periods,
            "DatapointsToAlarm": alarms.datapoints,
            "Threshold": float(threshold),
            "ComparisonOperator": comparison,
            # No request has reached the fleet yet: no reason to take it back.
            "TreatMissingData": "notBreaching",
        }
        for suffix, namespace, metric, dimensions, statistic, comparison, threshold, said in wanted
        if threshold is not None
    )


def floor_of(
    version: VersionRecord, k: int, alarms: AlarmSettings, domain: str | None, derive: bool
) -> float | None:
    """Acceptance length below which a version is taken back.

    Args:
        domain: that the probes' prompts are of; None: the one that it does best on.
        derive: whether a share of its own evaluation says something about these prompts.
    """
    if alarms.min_acceptance_length is not None:
        return alarms.min_acceptance_length
    measured = version.acceptance_of(k=k)
    if not derive or not measured:
        return None
    of = measured.get(domain or "")
    best = of.acceptance_length if of else max(one.acceptance_length for one in measured.values())
    return round(max(1.0, alarms.min_share_of_evaluation * best), 3)
