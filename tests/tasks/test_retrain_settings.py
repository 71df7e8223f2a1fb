"""The run form: every field explains itself, has a default, and has its default in one place."""

from __future__ import annotations

from typing import Any

import pytest
from prefect.utilities.callables import parameter_schema
from pydantic import ValidationError

from drafter.config import ExtractSettings, TrainSettings
from flows.retrain_drafter import retrain_drafter
from tasks.retrain_settings import RetrainSettings


def test_every_field_of_the_run_form_has_a_description_and_runs_by_default() -> None:
    definitions = parameter_schema(retrain_drafter).definitions
    without: list[str] = []
    for name, model in definitions.items():
        for field, schema in model.get("properties", {}).items():
            described = definitions[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
            if not (schema.get("description") or described.get("description")):
                without.append(f"{name}.{field}")

    assert "RetrainSettings" in definitions
    assert without == []
    assert "required" not in definitions["RetrainSettings"]


def test_defaults_are_those_of_the_verbs() -> None:
    settings = RetrainSettings()

    assert settings.training.num_epochs == TrainSettings.model_fields["num_epochs"].default
    assert settings.states.concurrency == ExtractSettings.model_fields["concurrency"].default


def test_a_load_that_is_expected_has_to_be_measured() -> None:
    with pytest.raises(ValidationError, match=r"gate.expected_concurrency is 8, and .* add 8 to it"):
        RetrainSettings.model_validate({"gate": {"expected_concurrency": 8}})
    values = {"gate": {"expected_concurrency": 8}, "evaluation": {"concurrency": [1, 8]}}
    assert RetrainSettings.model_validate(values).gate.expected_concurrency == 8


def test_what_the_flow_decides_is_not_asked_for() -> None:
    def names(schema: dict[str, Any]) -> set[str]:
        return {name for model in schema["$defs"].values() for name in model.get("properties", {})}

    asked = names(RetrainSettings.model_json_schema())
    assert asked.isdisjoint({"output", "states", "training", "warm_start", "python", "port", "on_problem"})


@pytest.mark.parametrize("typo", [{"sourcess": []}, {"training": {"num_epoch": 1}}, {"gate": {"min_al": 1}}])
def test_a_misspelt_setting_is_an_error(typo: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        RetrainSettings.model_validate(typo)


def test_prefect_yaml_holds_values_that_the_flow_takes() -> None:
    import yaml

    with open("prefect.yaml", encoding="utf-8") as file:
        deployments = yaml.safe_load(file)["deployments"]
    (deployment,) = [one for one in deployments if one["name"] == "retrain-drafter"]

    RetrainSettings.model_validate(deployment["parameters"]["settings"])
    assert [schedule["active"] for schedule in deployment["schedules"]] == [False]
