"""What is expected of conversations, as stock Great Expectations over `profile.parquet`.

The profile has one row per conversation read, those left out included. Columns are derived here first,
so that every check is a stock expectation whose page anybody who knows Great Expectations can read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tasks.retrain_settings import Severity, ValidationChoices

if TYPE_CHECKING:
    import pandas

PROFILE_COLUMNS = (
    "id",
    "domain",
    "split",
    "source",
    "problem",
    "num_turns",
    "first_role",
    "last_role",
    "roles",
    "num_empty_turns",
    "num_undecodable",
    "num_tokens",
    "num_supervised_tokens",
    "supervised_share",
    "is_duplicate",
    "prompt_digest",
    "fits_window",
)
# An optional system turn, then user and assistant in turn; the last answer may be left to the target.
ROLE_ORDER = r"^(?:system )?user(?: assistant user)*(?: assistant)?$"
_GX_SEVERITY = {"stop": "critical", "warn": "warning"}


def derive_columns(profile: pandas.DataFrame) -> pandas.DataFrame:
    """The profile with the columns that the expectations read.

    - `malformed`: the problem in words; null where there is none, or only one that has a check of its own
      (empty turns, characters that did not decode).
    - `kept_id`, `kept_sides`: id, and number of sides its prompt is on, of conversations that are used.
    - `in_train`, `in_evaluation`: 1 for those on that side.
    - `answer_share`: share of supervised tokens where the data brings an answer.
    """
    import pandas

    frame = profile.copy()
    if "problem" not in frame:
        return frame  # the expectation on columns says what is missing
    has_own_check = pandas.Series(False, index=frame.index)
    for column in ("num_empty_turns", "num_undecodable"):
        if column in frame:
            has_own_check |= frame[column] > 0
    frame["malformed"] = frame["problem"].where(~has_own_check)
    if {"roles", "last_role", "supervised_share"} <= set(frame):
        frame["roles"] = [_joined_roles(roles) for roles in frame["roles"]]
        frame["answer_share"] = frame["supervised_share"].where(frame["last_role"] == "assistant")
    if {"id", "split", "prompt_digest", "is_duplicate"} <= set(frame):
        kept = frame["problem"].isna() & ~frame["is_duplicate"].fillna(False).astype(bool)
        frame["kept_id"] = frame["id"].where(kept)
        sides = frame[kept].groupby("prompt_digest")["split"].nunique()
        frame["kept_sides"] = frame["prompt_digest"].map(sides).where(kept)
        for side in ("train", "evaluation"):
            frame[f"in_{side}"] = (kept & (frame["split"] == side)).astype(int)
    return frame


def _joined_roles(roles: Any) -> str | None:
    """Roles as words with one space between, whichever way the profile lists them."""
    if roles is None or roles != roles:  # NaN
        return None
    words = roles.replace(",", " ").split() if isinstance(roles, str) else list(roles)
    return " ".join(str(word) for word in words) or None


def build_expectations(choices: ValidationChoices, window_tokens: int, has_answers: bool) -> list[Any]:
    """Every check with its name and severity.

    Args:
        choices: tolerances and severities of this run.
        window_tokens: longest sequence that is trained on.
        has_answers: whether any conversation brings an answer; prompts alone have no share to check.
    """
    import great_expectations.expectations as gxe

    def check(kind: Any, name: str, severity: Severity, **values: Any) -> Any:
        return kind(severity=_GX_SEVERITY[severity], meta={"check": name}, **values)

    between = gxe.ExpectColumnValuesToBeBetween
    return [
        check(
            gxe.ExpectTableColumnsToMatchSet,
            "profile is complete",
            "stop",
            column_set=list(PROFILE_COLUMNS),
            exact_match=False,
        ),
        check(
            gxe.ExpectColumnValuesToBeNull,
            "conversations are well formed",
            choices.on_malformed,
            column="malformed",
            mostly=1 - choices.max_malformed_share,
        ),
        check(
            gxe.ExpectColumnValuesToMatchRegex,
            "roles take turns",
            choices.on_malformed,
            column="roles",
            regex=ROLE_ORDER,
            mostly=1 - choices.max_malformed_share,
        ),
        check(
            gxe.ExpectColumnValuesToBeInSet,
            "user or system begins",
            choices.on_malformed,
            column="first_role",
            value_set=["system", "user"],
            mostly=1 - choices.max_malformed_share,
        ),
        check(between, "no turn is empty", choices.on_empty_turns, column="num_empty_turns", max_value=0),
        check(
            between,
            "characters decode",
            choices.on_undecodable,
            column="num_undecodable",
            max_value=0,
            mostly=1 - choices.max_undecodable_share,
        ),
        check(
            between,
            "conversations fit the window",
            choices.on_length,
            column="num_tokens",
            min_value=1,
            max_value=window_tokens,
            mostly=1 - choices.max_truncated_share,
        ),
        check(
            gxe.ExpectColumnMedianToBeBetween,
            "the median conversation fits the window",
            "stop",
            column="num_tokens",
            min_value=1,
            max_value=window_tokens,
        ),
        *_expectations_on_sides(gxe, check, choices, has_answers),
    ]


def _expectations_on_sides(gxe: Any, check: Any, choices: ValidationChoices, has_answers: bool) -> list[Any]:
    """Checks on what is used: answers, duplicates, leakage, and enough on each side."""
    answers = check(
        gxe.ExpectColumnMeanToBeBetween,
        "answers make up enough of the tokens",
        choices.on_supervised_share,
        column="answer_share",
        min_value=choices.min_supervised_share,
        max_value=1,
    )
    enough = [
        check(
            gxe.ExpectColumnSumToBeBetween,
            f"enough conversations for {side}",
            choices.on_too_few,
            column=f"in_{side}",
            min_value=least,
        )
        for side, least in (("train", choices.min_train), ("evaluation", choices.min_evaluation))
    ]
    return [
        *([answers] if has_answers else []),
        *enough,
        check(
            gxe.ExpectColumnValuesToBeInSet,
            "few conversations are duplicates",
            choices.on_duplicates,
            column="is_duplicate",
            value_set=[False],
            mostly=1 - choices.max_duplicate_share,
        ),
        check(gxe.ExpectColumnValuesToBeUnique, "ids are unique", choices.on_leakage, column="kept_id"),
        check(
            gxe.ExpectColumnValuesToBeBetween,
            "no prompt is on both sides",
            choices.on_leakage,
            column="kept_sides",
            max_value=1,
        ),
    ]
