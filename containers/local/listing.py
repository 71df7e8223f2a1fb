"""What every List operation does: filter, sort, and hand out pages.

A NextToken names the last item of its page by what was sorted by, so that items created or deleted between two
pages neither shift nor repeat the others.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from containers.local.api_errors import validation
from containers.local.store import Resource

DEFAULT_PAGE = 10

_SORT_KEYS: dict[str, Callable[[Resource], Any]] = {
    "Name": lambda item: item.name,
    "CreationTime": lambda item: item.created_at,
    "Status": lambda item: item.body.get("status", ""),
}


def one_page(items: Sequence[Resource], request: Mapping[str, Any]) -> tuple[list[Resource], str | None]:
    """The page that a List request asks for, and the token of the next one (None: that was the last).

    Raises:
        ApiError: the NextToken is none that was given out.
    """
    sort_by = request.get("SortBy", "CreationTime")
    descending = request.get("SortOrder", "Descending") == "Descending"

    def position(item: Resource) -> tuple[Any, str]:
        return _SORT_KEYS[sort_by](item), item.name

    found = sorted((item for item in items if _matches(item, request)), key=position, reverse=descending)
    after = _read_token(request.get("NextToken"))
    if after is not None:
        found = [item for item in found if _is_after(position(item), after, descending)]
    page = found[: request.get("MaxResults", DEFAULT_PAGE)]
    more = len(found) > len(page)
    return page, _write_token(position(page[-1])) if more else None


def _matches(item: Resource, request: Mapping[str, Any]) -> bool:
    status = request.get("StatusEquals")
    return (
        request.get("NameContains", "").lower() in item.name.lower()
        and item.created_at <= request.get("CreationTimeBefore", item.created_at)
        and item.created_at >= request.get("CreationTimeAfter", item.created_at)
        and item.modified_at <= request.get("LastModifiedTimeBefore", item.modified_at)
        and item.modified_at >= request.get("LastModifiedTimeAfter", item.modified_at)
        and status in (None, item.body.get("status"))
    )


def _is_after(position: tuple[Any, str], last: tuple[Any, str], descending: bool) -> bool:
    try:
        return position < last if descending else position > last
    except TypeError:
        raise validation("The NextToken was given out for another sort order.") from None


def _write_token(position: tuple[Any, str]) -> str:
    return base64.urlsafe_b64encode(json.dumps(position).encode()).decode()


def _read_token(token: str | None) -> tuple[Any, str] | None:
    if token is None:
        return None
    try:
        value, name = json.loads(base64.urlsafe_b64decode(token))
    except ValueError:  # not base64, not JSON, not a pair
        raise validation("Invalid NextToken.") from None
    return value, name
