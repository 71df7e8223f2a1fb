"""What folders of tests share: a small target that vLLM serves, a trained drafter, two servers, moto; and which tests
run in one process.

Target and drafter are tiny, so that they are made, trained and served within a minute and everything that
a server computes stays cheap; the servers are the real vLLM of `.venv-vllm`. They run in float32: that is
where speculation has to be lossless to the token.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from drafter.serving import VllmServer
    from drafter.shards import Document

# A shell that starts the tests in the background lets them ignore Ctrl-C, and every process of theirs too.
signal.signal(signal.SIGINT, signal.default_int_handler)

# As in `python -m drafter`: threads that wait for work leave the cores to the tests beside them.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# As in `fledge`: nothing is told to anybody.
os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")

NUM_SPECULATIVE_TOKENS = 3
ANSWER_TOKENS = 96
_NUM_TRAINING_DOCUMENTS = 160
_NUM_EVALUATION_DOCUMENTS = 24

# With -n, tests of one group run in one process, one after another, and the groups that take longest begin first.
# A group is a file; but files that share servers and trainings are one group, so that those are made once.
_ON_VLLM = "files on vLLM"
_FILES_ON_VLLM = (
    "test_retrain_drafter",
    "test_run_form",
    "test_lossless",
    "test_batch_size_schedule",
    "test_sampling_distribution",
    "test_acceptance_agrees",
    "test_eagle3_acceptance_agrees",
    "test_evaluation",
    "test_extraction",
)
_LONGEST_FIRST = (
    _ON_VLLM,
    "test_targets_in_vllm",
    "test_deploy_endpoint",
    "test_promote_drafter",
    "test_monitor_endpoint",
    "test_local_deployment",
    "test_training_jobs",
    "test_trainer",
    "test_fledge_up",
    "test_approval_form",
    "test_endpoint_commands",
    "test_real_endpoint",  # measures: better beside short tests than beside the first group's servers
)


def _group(file: Path) -> str:
    return _ON_VLLM if file.stem in _FILES_ON_VLLM else file.stem


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the groups that take longest first."""
    turns = {group: turn for turn, group in enumerate(_LONGEST_FIRST)}
    items.sort(key=lambda item: turns.get(_group(item.path), len(turns)))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deal out groups. (xdist's own groups are those of a mark that it does not see in this pytest.)"""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(Path(nodeid.partition("::")[0]))

    return Groups(config, log)


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder that the first of this run's processes to ask for it fills; do not write to it afterwards."""
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # the run's; each process has one below it
    folder, done = root / name, root / f"{name}.done"
    with open(root / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a process that did not come to its end
            folder.mkdir()
            make(folder)
            done.touch()
    return folder


def make_servable_target(path: Path) -> Path:
    """A tiny Llama in shapes that vLLM's CPU kernels take, whose answers a drafter can learn to guess.

    A random Llama is a hash of its context: no drafter learns it in a minute. With large embeddings and
    small layers the next token follows mostly from the last one (a greedy bigram holds for 82 %).
    """
    from safetensors.torch import load_file, save_file

    from tests.drafter.tiny import make_target

    shape = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
    make_target(path, **shape)
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if "embed_tokens" in name:
            tensor *= 10
        elif "o_proj" in name or "down_proj" in name:
            tensor *= 0.03
    tensors["lm_head.weight"][256:] = 0.0  # special tokens never win, so no answer ends early
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def make_long_documents(target: Path, count: int, seed: int) -> list[Document]:
    """Random prompts, the tiny target's own greedy answers of `ANSWER_TOKENS` tokens, and its states."""
    import torch
    from transformers import AutoModelForCausalLM

    from drafter.shards import Document
    from drafter.target import load_target
    from tests.drafter.tiny import PROMPT_TOKENS

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 256, (count, PROMPT_TOKENS), generator=generator)
    before_norm: list[torch.Tensor] = []
    with torch.no_grad():
        output = model(ids, use_cache=True)
        for _ in range(ANSWER_TOKENS):
            newest = output.logits[:, -1:].argmax(-1)
            ids = torch.cat([ids, newest], dim=1)
            output = model(newest, past_key_values=output.past_key_values, use_cache=True)
        model.model.norm.register_forward_pre_hook(lambda module, inputs: before_norm.append(inputs[0]))
        hidden = model(ids, output_hidden_states=True).hidden_states
    auxiliary = torch.cat([hidden[layer] for layer in load_target(target).default_auxiliary_layers], dim=-1)
    mask = torch.arange(ids.shape[1]) >= PROMPT_TOKENS
    return [
        Document(
            id=f"{seed:08x}{index:024x}",
            domain="code",
            input_ids=ids[index],
            loss_mask=mask,
            auxiliary=auxiliary[index],
            final=before_norm[-1][index],
        )
        for index in range(count)
    ]


@pytest.fixture(scope="session")
def servable_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a target that vLLM serves."""
    made = made_once(tmp_path_factory, "served", lambda folder: make_servable_target(folder / "target"))
    return made / "target"


@pytest.fixture(scope="session")
def evaluation_documents(servable_target: Path) -> list[Document]:
    """Prompts that did not train, with the target's own greedy answers."""
    return make_long_documents(servable_target, _NUM_EVALUATION_DOCUMENTS, seed=1)


@pytest.fixture(scope="session")
def servable_drafter(servable_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported drafter, trained until it guesses a good share of the target's tokens."""
    made = made_once(
        tmp_path_factory, "served-drafter", lambda folder: train_servable_drafter(servable_target, folder)
    )
    return made / "drafter"


def train_servable_drafter(target: Path, folder: Path, **changes: object) -> Path:
    """Train for 40 s and export into `folder`; `changes` go on top of the training's settings."""
    from drafter.config import ExportSettings
    from drafter.export import export
    from drafter.trainer import train
    from tests.drafter.tiny import training_settings, write_states

    documents = make_long_documents(target, _NUM_TRAINING_DOCUMENTS, seed=0)
    states = write_states(folder / "train", target, documents)
    settings = training_settings(
        states,
        target,
        folder / "training",
        **{
            "drafter": {"draft_vocab_size": 256},
            "num_depths": NUM_SPECULATIVE_TOKENS + 1,
            "max_length_tokens": 1024,
            "num_epochs": 60,
            "time_budget_s": 40,
            "peak_learning_rate": 3e-3,
            **changes,
        },
    )
    train(settings)
    export(ExportSettings(training=folder / "training", target=target, output=folder / "drafter"))
    return folder / "drafter"


def serve(target: Path, log_path: Path, *arguments: str) -> VllmServer:
    """A server for the tiny target, in float32."""
    from drafter.config import ServerSettings
    from drafter.serving import VllmServer

    settings = ServerSettings(dtype="float32", max_num_seqs=32, kv_cache_gb=1, max_model_len_tokens=512)
    return VllmServer(target, settings, log_path, extra_args=arguments)


@pytest.fixture(scope="session")
def plain_server(servable_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """The target served in float32 without a drafter."""
    with serve(servable_target, tmp_path_factory.mktemp("plain") / "server.log") as server:
        yield server


@pytest.fixture(scope="session")
def drafting_server(
    servable_target: Path, servable_drafter: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmServer]:
    """The same target with the drafter, three tokens a draft."""
    from drafter.answers import PER_REQUEST_ACCEPTANCE
    from drafter.serving import speculative_arguments

    drafting = speculative_arguments(servable_drafter, NUM_SPECULATIVE_TOKENS)
    log_path = tmp_path_factory.mktemp("drafting") / "server.log"
    with serve(servable_target, log_path, *drafting, *PER_REQUEST_ACCEPTANCE) as server:
        yield server


@pytest.fixture(scope="session")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database whose tables exist: making them takes seconds. To be copied."""
    from tasks.settings import Places
    from tasks.track_runs import connect

    def make(home: Path) -> None:
        connect(Places(home=home, mlflow_tracking_uri=None)).search_experiments()

    return made_once(tmp_path_factory, "empty-mlflow", make) / "mlflow.db"


@pytest.fixture(scope="session")
def moto() -> Iterator[str]:
    """Address of moto's server: S3, CloudWatch, Application Auto Scaling, STS. It keeps what tests leave in it."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()
