"""What the approver reads above the form: the gate's results, the comparison, and what will be deployed."""

from __future__ import annotations

from datetime import datetime

from tasks.catalogue import find_entry
from tasks.endpoint_settings import DeploySettings
from tasks.settings import Places
from tasks.speculation import Speculation, choose_speculation
from tasks.version_record import MeasuredAcceptance, MeasuredSpeed, VersionRecord


def approval_text(version: VersionRecord, deployment: DeploySettings | None, expires_at: datetime) -> str:
    """Markdown for the form of one version. The form is narrow and scrolls, so what matters most is on top.

    Raises:
        EndpointError: the model to deploy is not in the catalogue.
    """
    parts = [
        f"### Put version {version.version} of {version.name} into production?",
        " ".join([_champion_line(version), *_rollback_line(version), _links(version)]),
        *_tables(version),
        *([f"**How to serve it.** {version.advice.sentence}"] if version.advice else []),
        "**After an approval**",
        _what_follows(version, deployment),
        "**What the gate found**",
        "\n".join(f"- {reason}" for reason in version.reasons) or "No reasons are recorded.",
        f"Digests: drafter `{version.drafter_digest[:12]}`, evaluation `{version.evaluation_digest[:12]}`. "
        f"The form is withdrawn at {expires_at:%Y-%m-%d %H:%M} UTC. A change of the champion, the version or "
        "its measurements before your answer makes the answer void.",
    ]
    return "\n\n".join(parts)


def _champion_line(version: VersionRecord) -> str:
    if version.champion is None:
        return "There is no champion yet: this would be the first drafter in production."
    if version.champion == version.version:
        return "This version is the champion already."
    return f"It would replace version {version.champion}, the champion."


def _rollback_line(version: VersionRecord) -> list[str]:
    if version.rolled_back_at is None:
        return []
    at = f"{version.rolled_back_at:%Y-%m-%d %H:%M} UTC"
    return [f"**It was taken back once, at {at}: {version.rollback_reason}**"]


def _tables(version: VersionRecord) -> list[str]:
    """Acceptance and speed at the chosen K, one line a domain, beside the champion and no speculation."""
    k = version.num_speculative_tokens
    if k is None:
        return ["No K was chosen."]
    acceptance, speed = version.acceptance_of(), version.speed_of()
    rival_acceptance, rival_speed = version.acceptance_of("champion"), version.speed_of("champion")
    lengths = [f"| acceptance, K={k} | this | champion |", "|---|--:|--:|"]
    for domain, one in acceptance.items():
        lengths.append(f"| {domain} | {_acceptance(one)} | {_acceptance(rival_acceptance.get(domain))} |")
    speeds = ["| tokens/s | this | champion | no drafter |", "|---|--:|--:|--:|"]
    for domain, fast in speed.items():
        speeds.append(f"| {domain} | {_speed(fast)} | {_speed(rival_speed.get(domain))} | {_plain(fast)} |")
    tables = ["\n".join(lengths), "\n".join(speeds)]
    if not rival_acceptance and version.champion is not None:
        tables.append("It was not measured beside a champion; figures of another evaluation do not compare.")
    return tables


def _acceptance(one: MeasuredAcceptance | None) -> str:
    return "" if one is None else f"{one.acceptance_length:.2f} ({one.lower:.2f} to {one.upper:.2f})"


def _speed(one: MeasuredSpeed | None) -> str:
    return "" if one is None else f"{one.output_tokens_per_second:.1f}"


def _plain(one: MeasuredSpeed | None) -> str:
    return "" if one is None or one.without_drafter is None else f"{one.without_drafter:.1f}"


def _what_follows(version: VersionRecord, deployment: DeploySettings | None) -> str:
    if deployment is None:
        return "The approval is recorded and nothing is deployed; `deploy-endpoint` may follow at any time."
    entry, rollout = find_entry(deployment.model), deployment.rollout
    speculation = choose_speculation(deployment, version, entry)
    machine = deployment.instance_type or entry.instance_types[0]
    count = deployment.instance_count or entry.instance_count
    price = entry.usd_per_hour(machine, Places().region)
    costs = "price unknown" if price is None else f"${price * count:.2f} an hour"
    moves = {
        "canary": f"{rollout.percent} % of the traffic first, the rest after {rollout.wait_s} s without an alarm",
        "linear": f"in steps of {rollout.percent} %, {rollout.wait_s} s apart, as long as no alarm goes off",
        "all_at_once": f"all traffic at once, watched for {rollout.wait_s} s",
    }[rollout.kind]
    return "\n".join(
        [
            f"- endpoint `{deployment.endpoint_name}`, model `{deployment.model}`, on {count} x {machine}, {costs}",
            f"- {_speculation(speculation)}",
            f"- where the endpoint serves already: {moves}",
            "- once it has taken all traffic, this version becomes `champion`",
        ]
    )


def _speculation(speculation: Speculation) -> str:
    words = f"K={speculation.num_speculative_tokens}, drafted in parallel"
    if speculation.schedule:
        ranges = [
            f"{drafted or 'none'} for {first} to {last}" for first, last, drafted in speculation.schedule
        ]
        words += f", by requests in the batch: {', '.join(ranges)}"
    return f"{words}; {speculation.note}" if speculation.note else words


def _links(version: VersionRecord) -> str:
    registry = Places().version_link(version.version)
    links = [f"[Report]({version.report})"] if version.report else ["No report is on this machine."]
    if registry:
        links.append(f"[Version {version.version} in the registry]({registry})")
    return " · ".join(links)
