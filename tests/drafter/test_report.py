"""The page and the JSON that an evaluation becomes."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from drafter.config import GateThresholds
from drafter.gate import decide_release
from drafter.metrics import MetricsWriter, StepMetrics
from drafter.records import EvaluationReport, ReleaseDecision
from drafter.report import report_as_json, write_report
from tests.drafter.synthetic_evaluation import make_cell, make_good_report, make_prompts, make_report

_VOID = {"meta", "br", "hr", "img", "input", "link"}


class _Page(HTMLParser):
    """Collects what the tests ask about, and checks that tags nest."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.cells: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        self.ids += [value for key, value in attributes if key == "id" and value]
        self.links += [
            v for k, v in attributes if k in ("src", "href", "xlink:href") and v and not v.startswith("#")
        ]
        if tag == "td":
            self.cells.append((values.get("class") or "", ""))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in _VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.cells and "td" in self.open:
            self.cells[-1] = (self.cells[-1][0], self.cells[-1][1] + data)


def read_page(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text(encoding="utf-8"))
    assert page.open == []
    return page


@pytest.fixture(scope="module")
def metrics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training that went well."""
    path = tmp_path_factory.mktemp("training") / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        for step in range(1, 201):
            writer.append(
                StepMetrics(
                    step=step,
                    epoch=step / 60,
                    elapsed_s=2.5 * step,
                    loss=1.2 + 6 * 0.98**step + 0.2 * (step % 5 - 2) / 2,
                    accuracy=tuple((0.6 - 0.5 * 0.98**step) * 0.6**depth for depth in range(6)),
                    gradient_norm=1.0,
                    learning_rate=1e-3,
                    tokens_per_s=1200.0,
                    memory_gb=3.0,
                )
            )
    return path


def decide(report: EvaluationReport) -> ReleaseDecision:
    return decide_release(report, "challenger", None, GateThresholds())


@pytest.fixture
def page(tmp_path: Path, metrics: Path) -> _Page:
    report = make_good_report()
    provenance = {"training": {"fingerprint": "abc123", "num_steps": 200}, "auxiliary_layers": [2, 15, 27]}
    return read_page(write_report(report, decide(report), metrics, provenance, tmp_path / "report.html"))


def test_page_needs_no_network_and_repeats_no_id(page: _Page) -> None:
    assert page.links == []
    assert len(page.ids) == len(set(page.ids))


def test_decision_numbers_and_provenance_are_on_the_page(page: _Page) -> None:
    for words in (
        "Approved",
        "How to serve it",
        "Above 1 do not speculate",
        "1.41×",
        "K=3",
        "no speculation",
        "humaneval",
        "abc123",
        "2, 15, 27",
        "Passed",
    ):
        assert words in page.text


def test_cells_where_speculation_loses_are_coloured(page: _Page) -> None:
    tones = {text.replace(" ", ""): tone for tone, text in page.cells}
    assert tones["821.41×"] == "good"
    assert tones["2620.73×"] == "bad"
    assert tones["1801.02×"] == "even"
    assert "bad" in tones["0.73×"]


def test_figures_follow_the_theme(page: _Page, tmp_path: Path, metrics: Path) -> None:
    report = make_good_report()
    text = write_report(report, decide(report), metrics, {}, tmp_path / "again.html").read_text(
        encoding="utf-8"
    )
    assert text.count("<svg role=") == 5
    assert "#0102" not in text


def test_hostile_names_are_escaped(tmp_path: Path) -> None:
    report = make_good_report().model_copy(update={"machine": "<script>alert(1)</script>"})
    path = write_report(report, decide(report), None, {"note": "<img src=x>"}, tmp_path / "report.html")
    assert "<script>" not in path.read_text(encoding="utf-8")
    assert "<img" not in path.read_text(encoding="utf-8")


def test_same_evaluation_gives_the_same_page(tmp_path: Path, metrics: Path) -> None:
    report = make_good_report()
    first = write_report(report, decide(report), metrics, {}, tmp_path / "a.html").read_bytes()
    assert first == write_report(report, decide(report), metrics, {}, tmp_path / "b.html").read_bytes()


def test_several_drafters_are_told_apart(tmp_path: Path) -> None:
    cells = [
        make_cell(None, 0, 1, 58.0),
        make_cell("challenger", 3, 1, 80.0),
        make_cell("champion", 3, 1, 70.0),
    ]
    prompts = make_prompts("challenger", 3, [1.9] * 12) + make_prompts("champion", 3, [1.8] * 12)
    report = make_report(cells, prompts)
    page = read_page(write_report(report, decide(report), None, {}, tmp_path / "report.html"))
    assert "challenger K=3" in page.text
    assert "champion K=3" in page.text
    assert "EAGLE-3" not in page.text.replace("P-EAGLE", "")
    assert "optimizer steps" not in page.text


def test_a_drafter_that_guesses_in_turn_is_called_eagle3(tmp_path: Path) -> None:
    in_turn = make_cell("eagle3", 3, 1, 70.0).model_copy(update={"speculation": "eagle3"})
    cells = [make_cell(None, 0, 1, 58.0), make_cell("challenger", 3, 1, 80.0), in_turn]
    prompts = make_prompts("challenger", 3, [1.9] * 12) + make_prompts("eagle3", 3, [2.1] * 12)
    report = make_report(cells, prompts)
    page = read_page(write_report(report, decide(report), None, {}, tmp_path / "report.html"))
    assert "eagle3 K=3 (EAGLE-3)" in page.text
    assert "challenger K=3 (EAGLE-3)" not in page.text


def test_evaluation_without_any_drafter_is_still_a_page(tmp_path: Path) -> None:
    report = make_report([make_cell(None, 0, 1, 58.0)], [])
    page = read_page(write_report(report, decide(report), None, {}, tmp_path / "report.html"))
    assert "Not enough evidence" in page.text


def test_json_has_what_scripts_ask_for() -> None:
    report = make_good_report()
    found = report_as_json(report, decide(report), "models:/drafter/3", {"states_digest": "s"})
    assert json.loads(json.dumps(found)) == found
    assert found["decision"]["outcome"] == "approve"
    assert found["serving_advice"]["num_speculative_tokens"] == 3
    assert found["serving_advice"]["speculate_up_to_concurrency"] == 1
    assert "advice" not in found["decision"]
    assert found["registry_uri"] == "models:/drafter/3"
    assert found["greedy_identical_share"] == {"bfloat16": 0.25, "float32": 1.0}
    assert found["provenance"]["states_digest"] == "s"
    wanted = {
        "speculation", "drafter", "num_speculative_tokens", "concurrency", "domain", "acceptance_length",
        "acceptance_rate_per_position", "output_tokens_per_second", "ttft_ms", "tpot_ms",
    }  # fmt: skip
    assert all(wanted <= cell.keys() for cell in found["cells"])
