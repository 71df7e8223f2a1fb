"""Models, endpoints and answers as people read them on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from tasks.chat_stream import StreamedAnswer
    from tasks.endpoint_status import EndpointStatus, FleetStatus
    from tasks.model_cards import ModelCard

HOURS_A_MONTH = 730


def show_models(shown: Any) -> None:
    """A table of all models, or the card of one."""
    from rich.table import Table

    if not isinstance(shown, list):
        show_card(shown)
        return
    table = Table()
    table.add_column("model", no_wrap=True)
    for heading in ("K", "published drafter", "default instance", "an hour"):
        table.add_column(heading, overflow="fold")
    for card in shown:
        head = card.entry.published_head
        where = f"{card.entry.instance_types[0]} x {card.entry.instance_count}"
        table.add_row(
            card.name,
            str(card.entry.num_speculative_tokens),
            head.hugging_face_id if head else "none: train one",
            where + (" (this machine only)" if card.entry.local else ""),
            price(card.usd_per_hour),
        )
    console().print(table)
    console().print("fledge models NAME shows a model's card; fledge deploy VERSION --model NAME deploys it.")


def show_card(card: ModelCard) -> None:
    """What a model is, where it runs, and what its container is told."""
    from rich.table import Table

    entry, out = card.entry, console()
    out.print(f"[bold]{entry.title}[/]  ({card.name})", highlight=False)
    table = Table(show_header=False, box=None)
    for name, value in _facts(card):
        table.add_row(name, value)
    out.print(table)
    out.print("\n[bold]What its drafter's server is told[/] (SM_VLLM_SPECULATIVE_CONFIG, word for word)")
    out.print(card.environment["SM_VLLM_SPECULATIVE_CONFIG"], highlight=False, soft_wrap=True, markup=False)
    if card.advice:
        out.print(card.advice, highlight=False, markup=False)
    out.print(
        f"The drafter's files lie in the channel `{card.channel}`: "
        f"/opt/ml/additional-model-data-sources/{card.channel} in the container."
    )
    out.print("\n[bold]The rest of the container's environment[/]")
    for name, value in sorted(card.environment.items()):
        if name != "SM_VLLM_SPECULATIVE_CONFIG":
            out.print(f"{name}={value}", highlight=False, soft_wrap=True, markup=False)
    for note in entry.notes:
        out.print(f"- {note}", highlight=False, style="dim", markup=False)


def _facts(card: ModelCard) -> list[tuple[str, str]]:
    entry, head = card.entry, card.entry.published_head
    layers = entry.auxiliary_layers
    facts = [
        ("JumpStart id", entry.jumpstart_id or "none known"),
        ("Hugging Face id", entry.hugging_face_id or "none"),
        ("layers, hidden size, vocabulary", _known(entry.num_layers, entry.hidden_size, entry.vocab_size)),
        ("layers that a drafter reads", _known(*layers) if layers else "unknown"),
        ("mask token", "unknown" if entry.mask_token_id is None else str(entry.mask_token_id)),
        ("published drafter", head.hugging_face_id if head else "none: train one with fledge retrain"),
    ]
    if head:
        licence = head.license or "unknown licence"
        facts.append(
            ("", f"{_known(head.num_layers)} layers, trained to K {_known(head.trained_depth)}, {licence}")
        )
    return [
        *facts,
        ("instance types", ", ".join(entry.instance_types) + (" (this machine only)" if entry.local else "")),
        ("if there is no capacity", ", ".join(entry.fallback_instance_types) or "no other type is tried"),
        ("an hour", price(card.usd_per_hour)),
        ("limits", f"{entry.model_download_timeout_s} s to download, {entry.startup_timeout_s} s to start"),
        ("network isolation", "yes" if entry.network_isolation else "no"),
        ("image", entry.image or f"AWS's vLLM image {entry.vllm_version}"),
    ]


def show_statuses(statuses: list[EndpointStatus]) -> None:
    """One line for each fleet; under them what went wrong, and the sum of the costs."""
    from rich.table import Table

    out = console()
    if not statuses:
        out.print("no endpoint; deploy one with fledge deploy VERSION")
        return
    table = Table("endpoint", "status", "drafter", "traffic", "instances", "an hour", "config")
    for status in statuses:
        for fleet in status.fleets:
            first = fleet is status.fleets[0]
            table.add_row(
                status.endpoint_name if first else "",
                status.status if first else fleet.state,
                _drafter(fleet),
                _share(status, fleet),
                f"{_known(fleet.instance_count)} x {fleet.instance_type or 'unknown'}",
                price(fleet.usd_per_hour),
                fleet.config_name,
            )
    out.print(table)
    for status in statuses:
        if status.failure_reason:
            out.print(f"{status.endpoint_name}: {status.failure_reason}", style="red", markup=False)
    out.print(f"together: {total_cost(statuses)}", highlight=False)


def endpoint_words(endpoint_name: str, status: EndpointStatus | None) -> str:
    """An endpoint in a line, for the question whether to delete it."""
    if status is None:
        return f"there is no endpoint {endpoint_name}; configs, models or alarms of it may be left"
    fleets = ", ".join(
        f"{_drafter(fleet)} on {_known(fleet.instance_count)} x {fleet.instance_type or 'unknown'}"
        for fleet in status.fleets
    )
    return f"{endpoint_name} is {status.status}: {fleets}; {price(status.usd_per_hour)} an hour"


def total_cost(statuses: list[EndpointStatus]) -> str:
    """What all endpoints cost, as far as it is known."""
    prices = [fleet.usd_per_hour for status in statuses for fleet in status.fleets]
    known = sum(one for one in prices if one is not None)
    if all(one is None for one in prices):
        return "what they cost is unknown; the catalogue has no price for these instances"
    beyond = " and more: not every price is known" if None in prices else ""
    return f"{price(known)} an hour, {price(known * HOURS_A_MONTH)} a month{beyond}"


def _drafter(fleet: FleetStatus) -> str:
    return fleet.served_name or (f"version {fleet.version}" if fleet.version else "not deployed by Fledge")


def _share(status: EndpointStatus, fleet: FleetStatus) -> str:
    """Measured where requests came; all of it where there is nobody to share with."""
    if len(status.fleets) == 1:
        return "none" if status.status in ("Creating", "Failed", "Deleting") else "all"
    return "no requests" if fleet.share_of_traffic is None else f"{fleet.share_of_traffic:.0%}"


def answer_line(answer: StreamedAnswer) -> str:
    """Speed, acceptance, and who answered."""
    speed = f"{answer.tokens_per_second:.0f} tokens/s" if answer.tokens_per_second else "no tokens"
    accepted = answer.acceptance_length
    acceptance = "no acceptance told" if accepted is None else f"acceptance length {accepted:.2f}"
    return (
        f"{answer.served_name}: {answer.latency_s:.2f} s (first token {answer.first_token_s:.2f} s), "
        f"{answer.output_tokens} tokens, {speed}, {acceptance}"
    )


def show_logs(logs: Any) -> None:
    for log in logs:
        print(f"==> {log.path} <==")
        print("\n".join(log.lines))


def show_endpoint(endpoint: Any) -> None:
    """What serves now, how its first answers were, and what one may do with it."""
    name, out = endpoint.endpoint_name, console()
    out.print(
        f"{name} is {endpoint.status}: {endpoint.served_name}, config {endpoint.config_name}", highlight=False
    )
    if endpoint.latency_ms is not None:
        accepted = endpoint.acceptance_length
        told = "" if accepted is None else f", acceptance length {accepted:.2f}"
        out.print(f"first answers: {endpoint.latency_ms / 1000:.2f} s{told}", highlight=False)
    out.print(f"{price(endpoint.usd_per_hour)} an hour until: fledge delete {name}", highlight=False)
    if endpoint.previous_config_name:
        out.print(
            f"back to {endpoint.previous_config_name}: fledge roll-back {name} --reason ...", highlight=False
        )
    out.print(f'ask it: fledge chat {name} "Hello"', highlight=False)


def show_approval(version: Any) -> None:
    """What was decided."""
    approval = version.approval
    if approval is None:
        print(f"{version.uri}: no decision is recorded")
        return
    print(f"{version.uri} {approval.outcome} by {approval.approver}: {approval.reason}")


def show_deleted(gone: Any) -> None:
    print("\n".join(f"deleted {name}" for name in gone) or "there is nothing left to delete")


def price(usd: float | None) -> str:
    return "unknown" if usd is None else f"${usd:,.2f}"


def console() -> Console:
    from drafter.terminal_report import make_console

    return make_console()


def _known(*values: int | None) -> str:
    return ", ".join("unknown" if value is None else str(value) for value in values)
