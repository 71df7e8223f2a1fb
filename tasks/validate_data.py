"""Great Expectations on a prepared dataset: what passed, failed or could not be checked, and its page."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from prefect import task
from prefect.cache_policies import NO_CACHE
from pydantic import Field

from drafter.errors import DataError
from drafter.files import write_text_atomically
from drafter.records import DatasetRecord, Record
from tasks.expectations import build_expectations, derive_columns
from tasks.retrain_settings import ValidationChoices

if TYPE_CHECKING:
    import pandas

RECORD_FILE = "validation.json"
MAX_EXAMPLES = 5


class Finding(Record):
    """What one check found."""

    check: str
    outcome: Literal["passed", "failed", "errored"] = Field(
        description="`errored`: the check itself broke, so nothing is known."
    )
    severity: Literal["stop", "warn"]
    detail: str = Field(description="What was observed, with the first few values that are not as expected.")


class ValidationRecord(Record):
    """`validation.json`: the findings, and where Great Expectations' page is."""

    path: str
    page: str = Field(description="Great Expectations' HTML page of this validation.")
    num_conversations: int
    findings: tuple[Finding, ...]

    @property
    def problems(self) -> tuple[Finding, ...]:
        """Findings other than passed."""
        return tuple(finding for finding in self.findings if finding.outcome != "passed")

    @property
    def outcome(self) -> Literal["passed", "warned", "stopped"]:
        severities = {finding.severity for finding in self.problems}
        if "stop" in severities:
            return "stopped"
        return "warned" if severities else "passed"

    def raise_if_stopped(self) -> None:
        """End the run on a check whose severity is `stop`.

        Raises:
            DataError: names each such check and says whether it failed or could not be made.
        """
        if self.outcome != "stopped":
            return
        lines = [
            f"{finding.check}: {'could not be checked: ' if finding.outcome == 'errored' else ''}{finding.detail}"
            for finding in self.problems
            if finding.severity == "stop"
        ]
        raise DataError(
            "the conversations did not pass validation:\n  - " + "\n  - ".join(lines),
            "every check of severity `stop` to pass",
            f"correct the data (all findings: {self.page}), or set the check's tolerance or severity "
            "under `validation`",
        )


@task(name="validate", cache_policy=NO_CACHE, timeout_seconds=1800)
def validate_data(
    dataset: DatasetRecord, choices: ValidationChoices, window_tokens: int, output: Path
) -> ValidationRecord:
    """Check the dataset's profile and write the page and, last, `validation.json` into `output`.

    A finished validation there is returned: its directory is named by data, choices and window.
    """
    if (output / RECORD_FILE).is_file():
        record: ValidationRecord = ValidationRecord.load(output / RECORD_FILE)
        if Path(record.page).is_file():
            return record
    import pandas

    profile = pandas.read_parquet(Path(dataset.path) / "profile.parquet")
    return validate_profile(profile, choices, window_tokens, output)


def validate_profile(
    profile: pandas.DataFrame, choices: ValidationChoices, window_tokens: int, output: Path
) -> ValidationRecord:
    """As `validate_data`, on a profile in memory."""
    frame = derive_columns(profile)
    has_answers = "answer_share" in frame and bool(frame["answer_share"].notna().any())
    expectations = build_expectations(choices, window_tokens, has_answers)
    shutil.rmtree(output, ignore_errors=True)  # the page belongs to this validation alone
    result, page = _run_great_expectations(frame, expectations, output.resolve())
    record = ValidationRecord(
        path=str(output),
        page=str(page),
        num_conversations=len(frame),
        findings=tuple(_finding(item) for item in result["results"]),
    )
    record.save(output / RECORD_FILE)
    return record


def _run_great_expectations(
    frame: pandas.DataFrame, expectations: list[Any], output: Path
) -> tuple[dict[str, Any], Path]:
    """The validation result as plain JSON, and the page of it."""
    os.environ.setdefault("GX_ANALYTICS_ENABLED", "false")
    import great_expectations as gx  # here, because it takes 6 s that no other task should pay

    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = {"globally": False}
    site = {
        "class_name": "SiteBuilder",
        "site_index_builder": {"class_name": "DefaultSiteIndexBuilder"},
        "store_backend": {
            "class_name": "TupleFilesystemStoreBackend",
            "base_directory": str(output / "great_expectations"),
        },
    }
    context.add_data_docs_site(site_name="fledge", site_config=site)
    asset = context.data_sources.add_pandas("profile").add_dataframe_asset("conversations")
    definition = gx.ValidationDefinition(
        name="conversations",
        data=asset.add_batch_definition_whole_dataframe("all"),
        suite=context.suites.add(gx.ExpectationSuite(name="conversations", expectations=expectations)),
    )
    checkpoint = gx.Checkpoint(
        name="conversations",
        validation_definitions=[context.validation_definitions.add(definition)],
        result_format={"result_format": "SUMMARY", "unexpected_index_column_names": ["id", "source"]}
        if {"id", "source"} <= set(frame)
        else "SUMMARY",
    )
    outcome = context.checkpoints.add(checkpoint).run(batch_parameters={"dataframe": frame})
    context.build_data_docs(site_names=["fledge"])
    (validation,) = outcome.run_results.values()
    return validation.to_json_dict(), _own_page(output)


def _own_page(output: Path) -> Path:
    """Copy the page of the validation to `validation.html`, without anything loaded from elsewhere.

    Great Expectations takes its styles and scripts from five content networks: nothing of a private
    dataset's page should tell them that it is being read, and it must be legible offline.
    """
    (page,) = (output / "great_expectations" / "validations").rglob("*.html")
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"<script\b[^>]*\bsrc=\"https?:[^>]*>\s*</script>", "", text)
    text = re.sub(r"<(link|img)\b[^>]*\b(href|src)=\"https?:[^>]*>", "", text)
    text = text.replace("</head>", f"<style>{_STYLE}</style></head>", 1)
    target = output / "validation.html"
    write_text_atomically(target, text)
    shutil.rmtree(output / "great_expectations")
    return target


def _finding(item: dict[str, Any]) -> Finding:
    config = item["expectation_config"]
    error = _exception_message(item.get("exception_info") or {})
    outcome: Literal["passed", "failed", "errored"] = "passed" if item["success"] else "failed"
    return Finding(
        check=config["meta"]["check"],
        outcome="errored" if error else outcome,
        severity="stop" if config["severity"] == "critical" else "warn",
        detail=error or _observed(item["result"]),
    )


def _exception_message(info: dict[str, Any]) -> str | None:
    """The message of an expectation that broke; it is given once, or once per metric under the metric's name."""
    for entry in (info, *(value for value in info.values() if isinstance(value, dict))):
        if entry.get("raised_exception"):
            return str(entry.get("exception_message") or "unknown error").strip().splitlines()[-1]
    return None


def _observed(result: dict[str, Any]) -> str:
    """`3 of 120 (2.5 %), e.g. "..."`, or the observed value of a check on the whole column."""
    if "unexpected_count" not in result:
        return f"observed {result.get('observed_value')}"
    text = f"{result['unexpected_count']} of {result['element_count']} not as expected"
    examples = _examples(result)
    return f"{text}, e.g. {'; '.join(examples)}" if examples else text


def _examples(result: dict[str, Any]) -> list[str]:
    """Where the first few are: the source names file and line."""
    rows = result.get("partial_unexpected_index_list") or []
    values = result.get("partial_unexpected_list") or []
    places = [str(row.get("source") or row.get("id")) for row in rows] or [""] * len(values)
    pairs = list(zip(places, values, strict=False))[:MAX_EXAMPLES]
    return [f"{place} ({value})" if place else str(value) for place, value in pairs]


_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem;color:#1d2433}
table{border-collapse:collapse;width:100%;margin:.5rem 0 1.5rem}
td,th{border-bottom:1px solid #d8dde6;padding:.45rem .6rem;text-align:left;vertical-align:top}
.popover,.modal,nav,footer,.navbar,.cooltip .top,.ge-breadcrumbs{display:none}
.row{display:block}ul{padding-left:1.2rem}.badge{background:#eef1f6;border-radius:.3rem;padding:0 .35rem}
.fa-check-circle::before{content:"✓";color:#16794c;font-weight:700}
.fa-times::before{content:"✗";color:#b3261e;font-weight:700}
.fa-exclamation-triangle::before{content:"!";color:#9a6700;font-weight:700}
"""
