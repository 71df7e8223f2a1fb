"""`fledge` verbs around an endpoint: find a model, approve, deploy, chat, see what runs and what it costs, delete.

Each verb imports what it needs when it runs, after `use_services` has said which cloud it speaks to.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from drafter.command_line import Verb
from flows.endpoint_choices import (
    ApproveChoice,
    ChatSettings,
    DeleteChoice,
    DeployChoice,
    LogsChoice,
    ModelsChoice,
    RollBackChoice,
    StatusChoice,
)
from tasks.endpoint_settings import DeleteSettings, DeploySettings, EndpointError, RollBackSettings
from tasks.settings import Places


def run_models(choice: ModelsChoice) -> Any:
    from tasks.local_environment import use_services

    places = use_services(say=False)
    from tasks.model_cards import list_cards, model_card

    if choice.name is None:
        return list_cards(places)
    return model_card(places, choice.name, choice.version, choice.num_speculative_tokens)


def run_deploy(choice: DeployChoice) -> Any:
    """The flow, here; its log on stderr tells each step, and each change of the endpoint while it waits."""
    settings = DeploySettings.model_validate(choice.model_dump(exclude_unset=True))
    use_pipeline()
    from flows.deploy_endpoint import deploy_endpoint

    with how_to_go_on(settings.endpoint_name):
        return deploy_endpoint(settings)


def run_status(choice: StatusChoice) -> Any:
    places = use_cloud()
    from tasks.aws import connect_aws
    from tasks.endpoint_status import list_statuses, read_status

    aws = connect_aws(places)
    return list_statuses(aws) if choice.endpoint_name is None else [read_status(aws, choice.endpoint_name)]


def run_chat(settings: ChatSettings) -> Any:
    """One question, or a conversation until the end of input. Returns every answer."""
    question = settings.message
    if question is None and not sys.stdin.isatty():
        question = sys.stdin.read()
    if question is not None and not question.strip():
        raise EndpointError("an empty question", "words to answer", 'fledge chat fledge "your question"')
    places = use_cloud()
    from flows.chat_prompt import answer_once, converse
    from tasks.aws import connect_aws

    aws = connect_aws(places)
    return converse(aws, settings) if question is None else [answer_once(aws, question, settings)]


def run_approve(choice: ApproveChoice) -> Any:
    """Answer the form that waits; if none does, run the same flow with the answer given beforehand."""
    use_pipeline()
    from flows.promote_drafter import promote_drafter
    from tasks.approval import approve_waiting
    from tasks.follow_approval import wait_for_approval
    from tasks.promote_settings import ApprovalAnswer, PromoteSettings
    from tasks.promotion import read_version

    decision = "reject" if choice.reject else "approve"
    answer = ApprovalAnswer(decision=decision, approver=choice.approver, reason=choice.reason)
    waiting = approve_waiting(choice.version, answer)
    if waiting is None:
        promote_drafter(PromoteSettings(version=choice.version, answer=answer))
        record = read_version(choice.version)
    else:
        print(f"the waiting run {waiting.name} goes on with your answer", file=sys.stderr)
        record = wait_for_approval(waiting)
    if not choice.reject:
        deploys = waiting is not None and waiting.deploys
        print(what_comes_next(record.version, deploys), file=sys.stderr)
    return record


def what_comes_next(version: str, deploys: bool) -> str:
    """After an approval; a second deployment beside the waiting run's own would be refused."""
    return (
        "next: the same run deploys it; `fledge status` shows how far it is"
        if deploys
        else f"next: fledge deploy {version}"
    )


def run_roll_back(choice: RollBackChoice) -> Any:
    settings = RollBackSettings.model_validate(choice.model_dump(exclude_unset=True))
    use_pipeline()
    from flows.roll_back_endpoint import roll_back_endpoint

    with how_to_go_on(settings.endpoint_name):
        return roll_back_endpoint(settings)


def run_logs(choice: LogsChoice) -> Any:
    from tasks.instance_logs import read_logs

    return read_logs(use_cloud(), choice.endpoint_name, choice.lines)


def use_cloud() -> Places:
    """This machine's cloud while `fledge up` runs, else AWS; says which."""
    from tasks.local_environment import use_services

    return use_services()


def use_pipeline() -> Places:
    """The same, and Prefect's files below FLEDGE_HOME. Before Prefect is imported."""
    from tasks.local_environment import set_environment_defaults

    places = use_cloud()
    set_environment_defaults(places)
    return places


@contextmanager
def how_to_go_on(endpoint_name: str) -> Iterator[None]:
    """Ctrl-C stops the waiting, not SageMaker: say how to see what becomes of it."""
    try:
        yield
    except KeyboardInterrupt:
        print(
            f"\nSageMaker goes on by itself. `fledge status {endpoint_name}` shows how far it is; the same "
            "command again waits for it and finishes what is left.",
            file=sys.stderr,
        )
        raise


def run_delete(choice: DeleteChoice) -> Any:
    """Ask once on a terminal, then delete."""
    places = use_pipeline()
    from flows.delete_endpoint import delete_endpoint

    if not choice.yes:
        ask_before_deleting(places, choice.endpoint_name)
    with how_to_go_on(choice.endpoint_name):
        return delete_endpoint(DeleteSettings(endpoint_name=choice.endpoint_name))


def ask_before_deleting(places: Places, endpoint_name: str) -> None:
    """Say what goes, and ask.

    Raises:
        EndpointError: nobody can answer, or somebody said no.
    """
    from flows.endpoint_tables import endpoint_words
    from tasks.aws import connect_aws
    from tasks.endpoint_status import find_status

    again = f"fledge delete {endpoint_name} --yes"
    if not sys.stdin.isatty():
        raise EndpointError("no terminal to ask on", "--yes where nobody can answer", again)
    status = find_status(connect_aws(places), endpoint_name)
    print(endpoint_words(endpoint_name, status), file=sys.stderr)
    print(
        "delete it with its configs, models, alarms and scaling? [y/N] ", end="", file=sys.stderr, flush=True
    )
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise EndpointError("not confirmed: nothing was deleted", "y or yes", again)


ENDPOINT_VERBS = (
    Verb(
        "models",
        ModelsChoice,
        run_models,
        "Find a model to deploy, and see its card.\n\n"
        "A card shows where the model runs and what it costs, and SM_VLLM_SPECULATIVE_CONFIG word for word as\n"
        "its container will get it. --version takes K from a registered drafter's evaluation.",
        (
            "fledge models",
            "fledge models gpt-oss-20b",
            "fledge models smollm2-135m-instruct --version challenger",
        ),
        show=lambda shown: _tables().show_models(shown),
    ),
    Verb(
        "approve",
        ApproveChoice,
        run_approve,
        "Say whether a drafter may go into production.\n\n"
        "Answers the form of a promote-drafter run that waits for it, which then deploys if it was asked to;\n"
        "without one it records the approval, and fledge deploy can follow. Names are those of\n"
        "FLEDGE_APPROVERS and are taken on trust. --reject says no.",
        (
            'fledge approve challenger --as ada --reason "better on support, equal elsewhere"',
            'fledge approve 4 --as ada --reason "too slow at our load" --reject',
        ),
        show=lambda version: _tables().show_approval(version),
    ),
    Verb(
        "deploy",
        DeployChoice,
        run_deploy,
        "Deploy an approved drafter version behind an endpoint, or move the endpoint to it.\n\n"
        "Uploads the drafter, creates model, config and alarms, shifts traffic as --rollout says, checks that\n"
        "the endpoint runs what was asked for, chats with it, and makes the version champion. An alarm takes\n"
        "the update back by itself. Stopped or killed, the same command continues.",
        (
            "fledge deploy 3",
            "fledge deploy challenger --endpoint-name support --model gpt-oss-20b "
            "--rollout.kind canary --rollout.percent 10 --rollout.wait-s 600",
            "fledge deploy 3 --parallel-drafting-spec.num-speculative-tokens 5 --capture.percent 20",
        ),
        show=lambda endpoint: _tables().show_endpoint(endpoint),
    ),
    Verb(
        "status",
        StatusChoice,
        run_status,
        "List endpoints: drafter versions, shares of the traffic, and what they cost an hour.\n\n"
        "Shares are of the requests of the last two minutes. With --json: for scripts.",
        ("fledge status", "fledge status fledge --json"),
        show=lambda statuses: _tables().show_statuses(statuses),
    ),
    Verb(
        "chat",
        ChatSettings,
        run_chat,
        "Ask an endpoint, and see how fast it was and how many of the drafter's guesses were right.\n\n"
        "The first argument is the endpoint, the second a question; without a question a prompt opens, or\n"
        "stdin is read. The line under an answer names the drafter version that served it.",
        (
            'fledge chat fledge "Write a haiku about birds."',
            "fledge chat",
            "fledge chat support --max-tokens 500",
        ),
        show=lambda answers: None,
    ),
    Verb(
        "roll-back",
        RollBackChoice,
        run_roll_back,
        "Take an endpoint back to what it ran before.\n\n"
        "Traffic returns to the previous config, the registry's champion too, and the reason is kept on the\n"
        "version that was taken back.",
        ('fledge roll-back fledge --reason "answers got slower since noon"',),
        show=lambda endpoint: _tables().show_endpoint(endpoint),
    ),
    Verb(
        "delete",
        DeleteChoice,
        run_delete,
        "Delete an endpoint with its configs, models, alarms and scaling; nothing of it costs any more.\n\n"
        "Asks once on a terminal; --yes does not ask. What is gone already is no error. The registry and the\n"
        "files in S3 stay.",
        ("fledge delete fledge", "fledge delete fledge --yes"),
        show=lambda gone: _tables().show_deleted(gone),
    ),
    Verb(
        "logs",
        LogsChoice,
        run_logs,
        "Show the last lines that an endpoint's instances on this machine wrote.",
        ("fledge logs fledge", "fledge logs fledge --lines 200"),
        show=lambda logs: _tables().show_logs(logs),
    ),
)


def _tables() -> Any:
    from flows import endpoint_tables

    return endpoint_tables
