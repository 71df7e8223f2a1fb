"""Whether a drafter can work behind a target, on this image and hardware. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from drafter.provenance import Provenance
from tasks.catalogue import CatalogueEntry
from tasks.endpoint_settings import EndpointError

_IMAGES_WITHOUT_SM_VLLM = ("djl-inference", "-lmi", "tgi", "sglang", "tritonserver")


def check_drafter(
    provenance: Provenance,
    config: Mapping[str, Any],
    entry: CatalogueEntry,
    k: int,
    target_fingerprint: str | None,
) -> None:
    """Refuse a head that cannot work behind this target, or not with this K.

    Args:
        config: the drafter's config.json.
        target_fingerprint: of the target that will be served; None: not known before it is there.

    Raises:
        EndpointError: K out of range, or a head that was trained for another target.
    """
    depth = provenance.settings.get("num_depths")
    if k < 1 or (depth is not None and k > depth):
        raise EndpointError(
            f"num_speculative_tokens is {k}",
            f"1 to {depth}, the depth that the drafter was trained to" if depth else "at least 1",
            "choose a K in that range, or leave it out: then it is what evaluation measured as best",
        )
    differences = list(_differences(provenance, config, entry, target_fingerprint))
    if differences:
        raise EndpointError(
            f"the drafter was trained for another target than {entry.title}: {'; '.join(differences)}",
            "a drafter of the target that it is deployed with",
            "choose the target's own entry of the catalogue (`fledge models`), or a drafter trained on this one",
        )


def _differences(
    provenance: Provenance,
    config: Mapping[str, Any],
    entry: CatalogueEntry,
    target_fingerprint: str | None,
) -> Iterator[str]:
    trained_on = provenance.target_fingerprint
    if target_fingerprint is not None and trained_on != target_fingerprint:
        yield f"its target's fingerprint is {trained_on}, this one's is {target_fingerprint}"
    hidden_size = config.get("target_hidden_size", config.get("hidden_size"))
    for name, given, expected in (
        ("hidden size", hidden_size, entry.hidden_size),
        ("vocabulary", config.get("vocab_size"), entry.vocab_size),
        ("auxiliary layers", provenance.auxiliary_layers, entry.auxiliary_layers),
        ("mask token", provenance.mask_token_id, entry.mask_token_id),
    ):
        if given is not None and expected is not None and given != expected:
            yield f"its {name} is {given}, the target's is {expected}"
    deepest = max(provenance.auxiliary_layers)
    if entry.num_layers is not None and deepest > entry.num_layers:
        yield f"it reads layer {deepest} of a target that has {entry.num_layers}"


def check_hardware(entry: CatalogueEntry, image: str, instance_types: tuple[str, ...]) -> None:
    """Refuse what would serve, but without the drafter.

    Raises:
        EndpointError: an image that knows no SM_VLLM_*, or an instance type on which it may be another one.
    """
    if any(part in image for part in _IMAGES_WITHOUT_SM_VLLM):
        raise EndpointError(
            f"image {image} reads none of the SM_VLLM_* variables: it would serve without the drafter",
            "AWS's vLLM image, or one that translates SM_VLLM_* as it does",
            "leave `image` out to take the catalogue's",
        )
    for instance_type in instance_types:
        if instance_type not in entry.instance_types:
            raise EndpointError(
                f"instance type {instance_type} for {entry.title}: its image there may be one that ignores "
                "SM_VLLM_*, and speculation would be silently off",
                f"one of {', '.join(entry.instance_types)}",
                "choose one of these; if you know that vLLM's own image runs there, add the type to the entry's "
                "instance_types in tasks/catalogue.yaml",
            )
