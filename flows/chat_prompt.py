"""`fledge chat`: one question, or a conversation at a prompt; the answer appears word by word."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from drafter.errors import FledgeError
from flows.endpoint_tables import answer_line

if TYPE_CHECKING:
    from flows.endpoint_choices import ChatSettings
    from tasks.aws import Aws
    from tasks.chat_stream import StreamedAnswer

Messages = list[dict[str, str]]
_END = ("/quit", "/exit")
_FORGET = "/new"


def answer_once(aws: Aws, question: str, settings: ChatSettings) -> StreamedAnswer:
    """Ask one question.

    Raises:
        FledgeError: no such endpoint, or it did not answer.
    """
    return _ask(aws, [*_beginning(settings), {"role": "user", "content": question}], settings)


def converse(aws: Aws, settings: ChatSettings) -> list[StreamedAnswer]:
    """Ask until the end of input. A question that fails is not remembered; the conversation goes on."""
    print(
        f"talking to {settings.endpoint_name}; {_FORGET} begins anew, /quit or Ctrl-D ends", file=sys.stderr
    )
    messages, answers = _beginning(settings), []
    while (question := _read_question()) is not None:
        if question == _FORGET:
            messages = _beginning(settings)
        elif question:
            asked: Messages = [*messages, {"role": "user", "content": question}]
            try:
                answer = _ask(aws, asked, settings)
            except FledgeError as error:
                print(f"{error}\n", file=sys.stderr)
                continue
            answers.append(answer)
            messages = [*asked, {"role": "assistant", "content": answer.text}]
    return answers


def _ask(aws: Aws, messages: Messages, settings: ChatSettings) -> StreamedAnswer:
    from tasks.chat_stream import ChatStream

    stream = ChatStream(aws, settings.endpoint_name, messages, settings.max_tokens, settings.temperature)
    try:
        for piece in stream:
            print(piece, end="", flush=True)
    finally:
        print(flush=True)
    assert stream.answer is not None
    print(f"[{answer_line(stream.answer)}]", file=sys.stderr, flush=True)
    return stream.answer


def _beginning(settings: ChatSettings) -> Messages:
    return [{"role": "system", "content": settings.system}] if settings.system else []


def _read_question() -> str | None:
    """A line; None at the end."""
    import readline  # noqa: F401 - editing and history at the prompt

    try:
        question = input("> ").strip()
    except EOFError:
        print()
        return None
    return None if question in _END else question
