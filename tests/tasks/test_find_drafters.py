"""Whether training can continue from the champion."""

from __future__ import annotations

from pathlib import Path

import pytest

from drafter.config import DrafterSettings
from tasks.find_drafters import RegisteredDrafter, warm_start_of
from tests.tasks.drafters_on_disk import export_drafter

SHAPE = DrafterSettings(num_layers=2, draft_vocab_size=16)


def champion(tmp_path: Path) -> RegisteredDrafter:
    return RegisteredDrafter(
        name="drafter",
        version="1",
        fingerprint="f",
        attempt="first",
        drafter=export_drafter(tmp_path / "champion"),
    )


def test_training_continues_from_a_champion_of_the_same_shape(tmp_path: Path) -> None:
    registered = champion(tmp_path)

    assert warm_start_of(registered, SHAPE) == registered.drafter
    assert warm_start_of(None, SHAPE) is None


@pytest.mark.parametrize(
    "change",
    [{"num_layers": 4}, {"draft_vocab_size": 32}, {"norm_before_residual": True}],
    ids=str,
)
def test_of_another_shape_it_starts_from_scratch_and_says_why(
    change: dict[str, int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", logger="fledge"):
        assert warm_start_of(champion(tmp_path), SHAPE.model_copy(update=change)) is None

    assert "training from scratch" in caplog.text
