"""The drafter that a training begins with: a new one, or its predecessor's weights (warm start)."""

from __future__ import annotations

from drafter.config import TrainSettings
from drafter.errors import CheckpointError
from drafter.export import load_exported_drafter
from drafter.initialization import TargetTensors, build_drafter
from drafter.model import Drafter, DrafterConfig
from drafter.target import Target
from drafter.training_data import TrainingData, open_training_data


def begin(settings: TrainSettings, target: Target) -> tuple[Drafter, TrainingData]:
    """The drafter before its first step, and the data to train it on.

    A predecessor brings its draft vocabulary and mask token along: a head whose rows changed their
    meaning would have to learn everything again.

    Raises:
        DataError: states that cannot be trained on.
        CheckpointError: a predecessor of another shape. (That it fits the target, preflight has said.)
    """
    if settings.warm_start is None:
        mask_token_id = target.mask_token_id if settings.algorithm == "peagle" else None
        data = open_training_data(settings.states, target, settings.max_length_tokens, mask_token_id)
        return _new_drafter(settings, target, data), data
    drafter = load_exported_drafter(settings.warm_start, target, settings.drafter.train_embedding)
    mask_token_id = drafter.config.mask_token_id
    data = open_training_data(settings.states, target, settings.max_length_tokens, mask_token_id)
    _check_predecessor(drafter.config, settings, target, data)
    return drafter, data


def _new_drafter(settings: TrainSettings, target: Target, data: TrainingData) -> Drafter:
    draft_ids = data.draft_vocabulary(settings.drafter.draft_vocab_size)
    auxiliary_layers = data.states.record.auxiliary_layers
    config = DrafterConfig.from_target(target, settings.drafter, data.mask_token_id, auxiliary_layers)
    init_from_target = settings.drafter.init_from_target
    return build_drafter(config, draft_ids, TargetTensors(target.path), init_from_target, settings.seed)


def _check_predecessor(
    config: DrafterConfig, settings: TrainSettings, target: Target, data: TrainingData
) -> None:
    wanted = settings.drafter
    pairs = {
        "algorithm": (config.algorithm, settings.algorithm),
        "num_layers": (config.num_layers, wanted.num_layers),
        "draft_vocab_size": (config.draft_vocab_size, min(wanted.draft_vocab_size, target.vocab_size)),
        "norm_before_residual": (config.norm_before_residual, wanted.norm_before_residual),
        "auxiliary_layers": (tuple(config.auxiliary_layers), tuple(data.states.record.auxiliary_layers)),
    }
    for name, (found, expected) in pairs.items():
        if found != expected:
            raise CheckpointError(
                f"{settings.warm_start}: {name} is {found}",
                f"{expected}, as this training's settings and states say",
                f"set {name} to the predecessor's {found}, or train without warm_start",
            )
