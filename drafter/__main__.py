"""`python -m drafter VERB`: every stage from a shell, with no service and no orchestrator.

Verbs import what they need when they run, so that help is instant and a missing extra hurts one verb only.
"""

from __future__ import annotations

import sys
from typing import Any

from drafter import config
from drafter.command_line import Verb, run_verbs
from drafter.machine import prepare_threads
from drafter.records import (
    AcceptanceEstimate,
    DatasetRecord,
    DrafterRecord,
    EvaluationReport,
    ReleaseDecision,
    StatesRecord,
    TrainingRecord,
)

DESCRIPTION = """\
Raise a P-EAGLE drafter: a small head that guesses the next K tokens of a target model in one pass,
so that vLLM answers faster with the same output. The verbs below are the stages, in order; each
writes a directory that the next one reads, is safe to run again, and continues where it was stopped."""


def run_prepare(settings: config.PrepareSettings) -> DatasetRecord:
    from drafter.conversations import prepare

    return prepare(settings)


def run_extract(settings: config.ExtractSettings) -> StatesRecord:
    from drafter.extraction import extract

    return extract(settings)


def run_train(settings: config.TrainSettings) -> TrainingRecord:
    prepare_threads()
    from drafter.distributed import is_first_rank
    from drafter.trainer import train

    record = train(settings)
    if not is_first_rank():
        raise SystemExit(0)  # one result is printed, the first rank's
    return record


def run_export(settings: config.ExportSettings) -> DrafterRecord:
    from drafter.export import export

    return export(settings)


def run_preflight(settings: config.PreflightSettings) -> list[str]:
    from drafter.preflight import preflight

    problems = list(preflight(settings))
    if not problems:
        print(f"{settings.drafter} fits {settings.target}", file=sys.stderr)
    return problems


def run_estimate(settings: config.EstimateSettings) -> AcceptanceEstimate:
    prepare_threads()
    from drafter.estimate import estimate

    return estimate(settings)


def run_evaluate(settings: config.EvaluateSettings) -> EvaluationReport:
    from drafter.evaluation import evaluate

    return evaluate(settings)


def run_decide(settings: config.DecideSettings) -> ReleaseDecision:
    from drafter.gate import decide_release

    report = EvaluationReport.load(settings.evaluation / "evaluation.json")
    decision = decide_release(report, settings.candidate, settings.champion, settings.thresholds)
    decision.save(settings.output or settings.evaluation / "decision.json")
    return decision


def run_report(settings: config.ReportSettings) -> str:
    from drafter.provenance import read_provenance
    from drafter.report import write_report

    evaluation = EvaluationReport.load(settings.evaluation / "evaluation.json")
    decision = ReleaseDecision.load(settings.evaluation / "decision.json")
    metrics = settings.training / "metrics.jsonl" if settings.training else None
    provenance = read_provenance(settings.drafter).model_dump(mode="json") if settings.drafter else {}
    output = settings.output or settings.evaluation / "report.html"
    return str(write_report(evaluation, decision, metrics, provenance, output))


def show_evaluation(report: EvaluationReport) -> None:
    from drafter.terminal_report import show_evaluation as show

    show(report)


def exit_code_of_preflight(problems: Any) -> int:
    return 1 if problems else 0


VERBS = (
    Verb(
        "prepare",
        config.PrepareSettings,
        run_prepare,
        "Read conversations, drop duplicates, hold some prompts out for evaluation.\n\n"
        "Reads OpenAI `messages` or ShareGPT, JSONL or Parquet, local or s3://. A malformed line stops the\n"
        "run and is named with its number, unless --on-problem drop.",
        (
            'python -m drafter prepare --sources \'{"uri": "chats.jsonl", "domain": "support"}\' '
            "--target models/target --output work/dataset",
        ),
    ),
    Verb(
        "extract",
        config.ExtractSettings,
        run_extract,
        "Let the target write the answers and record its hidden states, in one pass through vLLM.\n\n"
        "A drafter learns best from what its target really writes, so answers are written anew unless\n"
        "--answers given. Needs the vLLM environment (make setup). Says first how much disk it will need.",
        (
            "python -m drafter extract --dataset work/dataset --target models/target --output work/states",
            "python -m drafter extract --dataset work/dataset --target models/target --output work/heldout "
            "--split evaluation --server.max-num-seqs 32",
        ),
    ),
    Verb(
        "train",
        config.TrainSettings,
        run_train,
        "Train the drafter on the recorded states, exactly and in bounded memory.\n\n"
        "Writes metrics.jsonl as it goes and a checkpoint every minute; killed, it resumes in mid-epoch to the\n"
        "same losses. --warm-start continues from an exported drafter and keeps its draft vocabulary.\n"
        "--algorithm eagle3 trains what P-EAGLE is compared with: evaluate it with speculation eagle3.\n\n"
        "--num-ranks 2 trains in two processes, to the same losses: the documents of each step are divided\n"
        "over them, so a step should have several. It resumes with any number of them. For several machines\n"
        "there is torchrun: docs/distributed_training.md.",
        (
            "python -m drafter train --states work/states --target models/target --output work/training",
            "python -m drafter train --states work/states --target models/target --output work/training "
            "--drafter.num-layers 4 --num-depths 8 --time-budget-s 900",
            "python -m drafter train --algorithm eagle3 --states work/states --target models/target "
            "--output work/eagle3-training",
        ),
    ),
    Verb(
        "export",
        config.ExportSettings,
        run_export,
        "Write the directory that vLLM loads as it is, with provenance.json.",
        ("python -m drafter export --training work/training --target models/target --output work/drafter",),
    ),
    Verb(
        "preflight",
        config.PreflightSettings,
        run_preflight,
        "Name what is wrong with a drafter before a server is started with it.\n\n"
        "Prints one line per problem and exits with 1; no line and 0 when it fits. Starts nothing.",
        ("python -m drafter preflight --drafter work/drafter --target models/target",),
        exit_code_of_preflight,
    ),
    Verb(
        "estimate",
        config.EstimateSettings,
        run_estimate,
        "Predict the acceptance length from held-out states, walking each answer as decoding does.\n\n"
        "Quick and without a server. What counts is what `evaluate` measures in vLLM.",
        (
            "python -m drafter estimate --drafter work/drafter --states work/heldout --target models/target "
            "--num-speculative-tokens 5",
        ),
    ),
    Verb(
        "evaluate",
        config.EvaluateSettings,
        run_evaluate,
        "Measure drafters inside vLLM: acceptance and speed, per domain, K and concurrency.\n\n"
        "The same server answers without speculation too, so every figure stands beside its baseline, and\n"
        "greedy answers are compared token by token. Finished cells are kept when it is run again.",
        (
            "python -m drafter evaluate --dataset work/dataset --target models/target --output work/evaluation "
            '--candidates \'{"name": "challenger", "path": "work/drafter"}\' --concurrency 1,4',
            "python -m drafter evaluate --dataset work/dataset --target models/target --output work/comparison "
            '--candidates \'[{"name": "peagle", "path": "work/drafter"}, '
            '{"name": "eagle3", "path": "work/eagle3", "speculation": "eagle3"}]\'',
        ),
        show=show_evaluation,
    ),
    Verb(
        "decide",
        config.DecideSettings,
        run_decide,
        "Judge a candidate by what was measured: approve, reject, or not enough evidence.\n\n"
        "Exits with 0 whatever the outcome: deciding has worked. Read `outcome` and `reasons`.",
        (
            "python -m drafter decide --evaluation work/evaluation",
            "python -m drafter decide --evaluation work/evaluation --champion champion "
            "--thresholds.min-acceptance-length 1.8 --json",
        ),
    ),
    Verb(
        "report",
        config.ReportSettings,
        run_report,
        "Write what was measured and decided as one HTML page, and print its path.",
        ("python -m drafter report --evaluation work/evaluation --training work/training",),
    ),
)


def main() -> int:
    return run_verbs("python -m drafter", DESCRIPTION, VERBS, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
