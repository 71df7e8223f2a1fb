"""`vllm bench serve`, many times in one process: importing vLLM takes 12 s on two cores, a measurement 15.

    python -m fledge_vllm.bench

Reads one JSON list of `vllm bench serve` arguments a line from standard input and answers each with one
JSON line: `{"result": {...}}` as vLLM saves it, or `{"error": "..."}`. Ends when standard input closes.
Everything that vLLM prints goes to standard error.
"""

import argparse
import json
import os
import sys
import traceback


def _load_prompts(dataset) -> None:
    """Read a JSONL file of prompts in its order. vLLM's own reader wants pandas, which this environment leaves out."""
    with open(dataset.dataset_path, encoding="utf-8") as lines:
        dataset.data = [json.loads(line) for line in lines]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    from vllm.benchmarks.datasets import datasets
    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as bench_serve

    datasets.CustomDataset.load_data = _load_prompts
    print("ready to measure", flush=True)
    for line in sys.stdin:
        parser = argparse.ArgumentParser(exit_on_error=False)
        add_cli_args(parser)
        try:
            answer = {"result": bench_serve(parser.parse_args(json.loads(line)))}
        except (Exception, SystemExit):
            answer = {"error": traceback.format_exc()}
            print(answer["error"], flush=True)
        print(json.dumps(answer, default=str), file=answers, flush=True)


if __name__ == "__main__":
    main()
