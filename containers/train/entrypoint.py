"""The training container's first process: SageMaker's paths on one side, `python -m drafter train` on the other.

    /opt/ml/input/data/states, target[, warm_start]     the channels
    /opt/ml/input/config/hyperparameters.json           fields of TrainSettings, each as text or JSON
    /opt/ml/checkpoints/training                        where it trains: SageMaker keeps it equal with S3
    /opt/ml/model                                       the finished training
    /opt/ml/output/failure                              why it failed, shown as the job's FailureReason

SIGTERM (a spot interruption, a stopped job, the end of its time) goes on to the trainer, which writes a
checkpoint within the two minutes that SageMaker grants; the next start finds it and continues.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError, safe_open

from drafter.errors import FledgeError

ROOT = Path(os.environ.get("FLEDGE_ML_ROOT", "/opt/ml"))
CHANNELS = {"states": True, "target": True, "warm_start": False}  # name -> whether it must be there
RESULT = ("weights.safetensors", "drafter.json", "settings.json", "metrics.jsonl", "training.json")
# SageMaker kills 120 s after SIGTERM.
SHUTDOWN_TIMEOUT_S = 110
FAILURE_CHARACTERS = 1024  # more of the file is not shown
EXIT_FAILED = 1
EXIT_TERMINATED = 128 + signal.SIGTERM

_SAID_ERROR = re.compile(
    r"^python -m drafter train: .*?\n  expected: .*?\n  what to do: [^\n]*", re.DOTALL | re.MULTILINE
)
_TORCHRUNS_REPORT = re.compile(
    r"^E\d{4} .*torch/distributed/", re.MULTILINE
)  # what follows is not the trainer's
_KILLED = re.compile(r"^\s*exitcode\s*: -(\d+) ", re.MULTILINE)


def main(arguments: list[str]) -> int:
    """Train, and say on the platform's terms how it ended."""
    stop = StopSignal()
    try:
        require_training(arguments)
        require_one_process()
        training = ROOT / "checkpoints" / "training"
        settings = build_settings(training)
        drop_broken_checkpoints(training)
        exit_code, said = run_trainer(settings, stop)
        if exit_code == 0:
            publish(training, ROOT / "model")
            return 0
        if stop.asked:
            print("stopped; the next start continues from the checkpoint", file=sys.stderr)
            return EXIT_TERMINATED
        return fail(reason_of(exit_code, said))
    except FledgeError as error:
        return fail(str(error))


class StopSignal:
    """Remembers SIGTERM and hands it on to the child, whichever of the two comes first."""

    def __init__(self) -> None:
        self.asked = False
        self._child: subprocess.Popen[str] | None = None
        signal.signal(signal.SIGTERM, self._remember)

    def watch(self, child: subprocess.Popen[str]) -> None:
        self._child = child
        if self.asked:
            child.send_signal(signal.SIGTERM)

    def _remember(self, *_: object) -> None:
        self.asked = True
        if self._child is not None:
            self._child.send_signal(signal.SIGTERM)


def require_training(arguments: list[str]) -> None:
    """SageMaker starts a training container with the argument `train`."""
    if arguments not in ([], ["train"]):
        raise FledgeError(
            f"started with {' '.join(arguments)!r}",
            "`train`, as SageMaker starts a training job",
            "use this image for training jobs; endpoints run another",
        )


def require_one_process() -> None:
    """Refuse a job that would pay for more than one process can use.

    Raises:
        FledgeError: several instances, or one with several GPUs.
    """
    hosts, num_gpus = read_hosts(), count_gpus()
    num_processes = len(hosts) * max(num_gpus, 1)
    if num_processes > 1:
        here = os.environ.get("SM_CURRENT_HOST", hosts[0])
        raise FledgeError(
            f"{num_processes} training processes: {len(hosts)} instances ({', '.join(hosts)}), "
            f"{num_gpus} GPUs at {here}",
            "one: this image starts the trainer in one process",
            "start the job with one instance of a type that has one GPU, such as ml.g6e.2xlarge or ml.p5.4xlarge",
        )


def read_hosts() -> list[str]:
    """Names of the job's instances, as the training toolkit (SM_HOSTS) or the platform's file says."""
    if "SM_HOSTS" in os.environ:
        return list(json.loads(os.environ["SM_HOSTS"]))
    resources = ROOT / "input" / "config" / "resourceconfig.json"
    return list(json.loads(resources.read_text())["hosts"]) if resources.is_file() else ["algo-1"]


def count_gpus() -> int:
    """GPUs of this instance, as the toolkit (SM_NUM_GPUS) or NVIDIA's driver says."""
    if "SM_NUM_GPUS" in os.environ:
        return int(os.environ["SM_NUM_GPUS"])
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        return 0
    return len(listed.stdout.splitlines()) if listed.returncode == 0 else 0


def build_settings(training: Path) -> dict[str, Any]:
    """Settings of `python -m drafter train`: hyperparameters, and the paths that the platform gives.

    Raises:
        FledgeError: a channel is missing, or a hyperparameter names a path.
    """
    settings: dict[str, Any] = {"output": str(training)}
    for channel, is_required in CHANNELS.items():
        folder = ROOT / "input" / "data" / channel
        if folder.is_dir():
            settings[channel] = str(folder)
        elif is_required:
            raise FledgeError(
                f"no channel {channel!r}",
                f"channels {', '.join(CHANNELS)} (the last one if training continues from a drafter)",
                f"name the S3 prefix of the {channel} as the job's input {channel!r}",
            )
    return settings | read_hyperparameters()


def read_hyperparameters() -> dict[str, Any]:
    """The fields of TrainSettings that the job chose. SageMaker makes every value text; JSON is read back."""
    path = ROOT / "input" / "config" / "hyperparameters.json"
    given = json.loads(path.read_text() or "{}") if path.is_file() else {}
    chosen = {name: value for name, value in given.items() if not name.startswith(("sagemaker_", "_tuning_"))}
    paths = sorted({"output", *CHANNELS} & chosen.keys())
    if paths:
        raise FledgeError(
            f"hyperparameter {paths[0]!r}",
            "none of " + ", ".join(["output", *CHANNELS]) + ": these are the job's channels and directories",
            "leave it out",
        )
    return {name: read_value(value) for name, value in chosen.items()}


def read_value(text: Any) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError):
        return text


def drop_broken_checkpoints(training: Path) -> None:
    """Remove checkpoints of which only some files had reached S3 when the instance went away."""
    for checkpoint in sorted(training.glob("checkpoint-*")):
        if not is_whole(checkpoint):
            print(f"{checkpoint.name} is not whole: training continues from an earlier one", file=sys.stderr)
            shutil.rmtree(checkpoint)


def is_whole(checkpoint: Path) -> bool:
    try:
        json.loads((checkpoint / "state.json").read_text())
        with safe_open(checkpoint / "state.safetensors", framework="numpy"):  # compares header and length
            return True
    except (OSError, ValueError, SafetensorError):
        return False


def run_trainer(settings: dict[str, Any], stop: StopSignal) -> tuple[int, str]:
    """Run the trainer under torchrun to its end; its exit code and the last lines that it wrote."""
    settings_file = ROOT / "checkpoints" / "job_settings.json"
    settings_file.parent.mkdir(parents=True, exist_ok=True)
    settings_file.write_text(json.dumps(settings, indent=2))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nnodes=1", "--nproc-per-node=1"]
    patience = [f"--shutdown-timeout={SHUTDOWN_TIMEOUT_S}"]
    verb = ["-m", "drafter", "train", "--settings", str(settings_file), "--json"]
    child = subprocess.Popen(
        [sys.executable, *torchrun, *patience, *verb],
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    stop.watch(child)
    assert child.stderr is not None
    lines: deque[str] = deque(maxlen=400)
    reader = threading.Thread(target=follow, args=(child.stderr, lines))
    reader.start()
    exit_code = child.wait()
    reader.join()
    return exit_code, "".join(lines)


def follow(pipe: IO[str], kept: deque[str]) -> None:
    """Hand lines on to the job's log as they come, and keep the last ones."""
    for line in pipe:
        kept.append(line)
        sys.stderr.write(line)
        sys.stderr.flush()


def reason_of(exit_code: int, said: str) -> str:
    """What the trainer itself gave as the reason; else how it ended and its last lines."""
    error = _SAID_ERROR.search(said)
    if error is not None:
        return error[0]
    killed = _KILLED.search(said)
    if killed is not None:
        likely = "; it ran out of memory, most likely" if killed[1] == "9" else ""
        return f"the trainer was ended by signal {killed[1]}{likely}"
    own = _TORCHRUNS_REPORT.split(said, maxsplit=1)[0]
    return f"the trainer ended with exit code {exit_code}; its last lines:\n{own.rstrip()[-700:]}"


def publish(training: Path, model: Path) -> None:
    """Copy the finished training to where SageMaker takes the result from, its record last."""
    model.mkdir(parents=True, exist_ok=True)
    for name in RESULT:
        shutil.copyfile(training / name, model / name)


def fail(reason: str) -> int:
    """Leave the reason where SageMaker reads it."""
    print(reason, file=sys.stderr)
    failure = ROOT / "output" / "failure"
    failure.parent.mkdir(parents=True, exist_ok=True)
    failure.write_text(reason[:FAILURE_CHARACTERS])
    return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
