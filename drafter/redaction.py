"""Personal data taken out of conversations before anything is written.

Each redactor puts a plain word in brackets where it found something (`[email address]`), so that the text
still reads as text to the target. They find what has a form; a name or an address in prose has none, and
stays. An installation's own redactors go in `custom`, and must be allowed by the environment first.
"""

from __future__ import annotations

import importlib
import ipaddress
import os
import re
from collections.abc import Callable, Iterable

from drafter.config import RedactionSettings
from drafter.errors import FledgeError

ALLOWED_VARIABLE = "FLEDGE_CUSTOM_REDACTORS"

Redactor = Callable[[str], str]

# Anchored at the start of a word, so that a long one without "@" is looked at once.
_EMAIL = re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@(?:[\w-]{1,63}\.)+[^\W\d_]{2,24}\b")
_CARD = re.compile(r"(?<![\d.-])[2-6](?:[ -]?\d){12,18}(?![\d-])")
_IP_ADDRESS = re.compile(
    r"(?<![\w.:])(?:\d{1,3}(?:\.\d{1,3}){3}|[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){2,7})(?![\w:])"
)


def build_redactor(settings: RedactionSettings) -> Redactor:
    """One function that applies every redactor of the settings, in a fixed order.

    Raises:
        FledgeError: a custom redactor that is not allowed, not there, or no function.
    """
    # Card numbers go before phone numbers: a part of one may look like the other.
    built_in: dict[str, Redactor] = {
        "email": redact_emails,
        "card": redact_cards,
        "ip_address": redact_ip_addresses,
        "phone": lambda text: redact_phones(text, settings.phone_regions),
    }
    redactors = [redact for name, redact in built_in.items() if name in settings.kinds]
    redactors += [_load_custom(path) for path in settings.custom]

    def redact_all(text: str) -> str:
        for redact in redactors:
            text = redact(text)
        return text

    return redact_all


def redact_emails(text: str) -> str:
    """E-mail addresses."""
    return _EMAIL.sub("[email address]", text)


def redact_cards(text: str) -> str:
    """Payment card numbers: 13 to 19 digits, perhaps in groups, whose check digit (Luhn) is right."""
    return _CARD.sub(lambda match: "[card number]" if _passes_luhn(match[0]) else match[0], text)


def redact_ip_addresses(text: str) -> str:
    """Public IP addresses, version 4 and 6; those of private networks and this machine name nobody."""
    return _IP_ADDRESS.sub(lambda match: "[IP address]" if _is_public(match[0]) else match[0], text)


def redact_phones(text: str, regions: Iterable[str]) -> str:
    """Phone numbers that could be dialled: with a country code, or as written within one of the regions.

    Args:
        regions: ISO 3166 codes (`US`, `DE`), whose own way of writing numbers is known too.
    """
    import phonenumbers

    for region in regions or (None,):
        for match in reversed(list(phonenumbers.PhoneNumberMatcher(text, region))):
            text = f"{text[: match.start]}[phone number]{text[match.end :]}"
    return text


def _passes_luhn(number: str) -> bool:
    digits = [int(character) for character in reversed(number) if character.isdigit()]
    doubled = [sum(divmod(2 * digit, 10)) for digit in digits[1::2]]
    return (sum(digits[::2]) + sum(doubled)) % 10 == 0


def _is_public(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).is_global
    except ValueError:
        return False


def _load_custom(path: str) -> Redactor:
    """The function behind `package.module:function`.

    The settings may come from a form on a web page; what they may import is for whoever runs the worker to say.
    """
    allowed = {name.strip() for name in os.environ.get(ALLOWED_VARIABLE, "").split(",")} - {""}
    if path not in allowed:
        raise FledgeError(
            f"redactor {path!r} is not allowed",
            f"one that {ALLOWED_VARIABLE} names" + (f" ({', '.join(sorted(allowed))})" if allowed else ""),
            f"if you trust its code, set {ALLOWED_VARIABLE}={path} where `prepare` runs",
        )
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise FledgeError(
            f"redactor {path!r}: {error}",
            "package.module:function, installed where `prepare` runs",
            "install the package, or correct the name",
        ) from None

    def redact(text: str) -> str:
        redacted = found(text)
        if not isinstance(redacted, str):
            raise FledgeError(
                f"redactor {path!r} returned {type(redacted).__name__}",
                "text: it is called with a turn's text and returns what may be kept of it",
                "correct the function",
            )
        return redacted

    return redact
