"""Models, endpoint configs and tags: what needs no process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from containers.local.api_errors import ApiError, already_exists, not_found, validation
from containers.local.arn import resource_arn
from containers.local.listing import one_page
from containers.local.store import Kind, Resource, Store

_MAX_TAGS = 50
_NOT_HERE = "is not supported by the SageMaker of this machine"


class ResourceOperations:
    """Create, describe, list and delete models and endpoint configs; tags of everything."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def create_model(self, request: dict[str, Any]) -> dict[str, Any]:
        _check_model(request)
        return {"ModelArn": self._create("model", request.pop("ModelName"), request)}

    def describe_model(self, request: dict[str, Any]) -> dict[str, Any]:
        model = self.find("model", request["ModelName"])
        return {
            **model.body,
            "EnableNetworkIsolation": model.body.get("EnableNetworkIsolation", False),
            "ModelName": model.name,
            "ModelArn": resource_arn("model", model.name),
            "CreationTime": model.created_at,
        }

    def list_models(self, request: dict[str, Any]) -> dict[str, Any]:
        return self._list("model", "Model", request)

    def delete_model(self, request: dict[str, Any]) -> dict[str, Any]:
        self._delete("model", request["ModelName"])
        return {}

    def create_endpoint_config(self, request: dict[str, Any]) -> dict[str, Any]:
        _check_endpoint_config(request)
        for variant in request["ProductionVariants"]:
            self.find("model", variant["ModelName"])
        name = request.pop("EndpointConfigName")
        return {"EndpointConfigArn": self._create("endpoint-config", name, request)}

    def describe_endpoint_config(self, request: dict[str, Any]) -> dict[str, Any]:
        config = self.find("endpoint-config", request["EndpointConfigName"])
        return {
            **config.body,
            "EndpointConfigName": config.name,
            "EndpointConfigArn": resource_arn("endpoint-config", config.name),
            "CreationTime": config.created_at,
        }

    def list_endpoint_configs(self, request: dict[str, Any]) -> dict[str, Any]:
        return self._list("endpoint-config", "EndpointConfig", request)

    def delete_endpoint_config(self, request: dict[str, Any]) -> dict[str, Any]:
        """Also of a config in use, as SageMaker lets it: its endpoint then cannot be updated any more."""
        self._delete("endpoint-config", request["EndpointConfigName"])
        return {}

    def add_tags(self, request: dict[str, Any]) -> dict[str, Any]:
        arn = self._existing_arn(request["ResourceArn"])
        self.put_tags(arn, request["Tags"])
        return {"Tags": _as_list(self._store.tags(arn))}

    def list_tags(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"Tags": _as_list(self._store.tags(self._existing_arn(request["ResourceArn"])))}

    def delete_tags(self, request: dict[str, Any]) -> dict[str, Any]:
        self._store.delete_tags(self._existing_arn(request["ResourceArn"]), request["TagKeys"])
        return {}

    def find(self, kind: Kind, name: str) -> Resource:
        """A resource by its name.

        Raises:
            ApiError: there is none.
        """
        found = self._store.get(kind, name)
        if found is None:
            raise not_found(kind, name)
        return found

    def check_tags(self, arn: str, tags: list[dict[str, str]]) -> dict[str, str]:
        """Tags as they would be added.

        Raises:
            ApiError: a reserved or repeated key, or more than 50.
        """
        added = {tag["Key"]: tag["Value"] for tag in tags}
        if len(added) < len(tags):
            raise validation("Duplicate tag keys found. Please note that Tag keys are case insensitive.")
        if any(key.lower().startswith("aws:") for key in added):
            raise validation("Tag keys starting with 'aws:' are reserved for system use.")
        if len({**self._store.tags(arn), **added}) > _MAX_TAGS:
            raise ApiError("ResourceLimitExceeded", f"{arn} has more than {_MAX_TAGS} tags.")
        return added

    def put_tags(self, arn: str, tags: list[dict[str, str]]) -> None:
        self._store.put_tags(arn, self.check_tags(arn, tags))

    def _create(self, kind: Kind, name: str, body: dict[str, Any]) -> str:
        if self._store.get(kind, name) is not None:
            raise already_exists(kind, name)
        arn = resource_arn(kind, name)
        tags = self.check_tags(arn, body.pop("Tags", []))
        self._store.put(kind, name, body)
        self._store.put_tags(arn, tags)
        return arn

    def _delete(self, kind: Kind, name: str) -> None:
        self.find(kind, name)
        self._store.delete(kind, name, resource_arn(kind, name))

    def _list(self, kind: Kind, word: str, request: dict[str, Any]) -> dict[str, Any]:
        page, token = one_page(self._store.all(kind), request)
        summaries = [
            {
                f"{word}Name": item.name,
                f"{word}Arn": resource_arn(kind, item.name),
                "CreationTime": item.created_at,
            }
            for item in page
        ]
        return {f"{word}s": summaries, **({"NextToken": token} if token else {})}

    def _existing_arn(self, arn: str) -> str:
        kind, _, name = arn.partition("sagemaker:")[2].split(":")[-1].partition("/")
        kinds: tuple[Kind, ...] = ("model", "endpoint-config", "endpoint")
        for known in kinds:
            for item in self._store.all(known) if kind == known else ():
                if item.name.lower() == name.lower():
                    return resource_arn(known, item.name)
        raise validation(f'Could not find resource "{arn}".')


def _check_model(request: Mapping[str, Any]) -> None:
    """SageMaker's own rules for a model, which its service model does not say.

    Raises:
        ApiError: one is broken, or asks for what this machine does not do.
    """
    for name in ("Containers", "InferenceExecutionConfig"):
        if request.get(name):
            raise validation(f"{name} {_NOT_HERE}: give one PrimaryContainer.")
    container = request.get("PrimaryContainer")
    if container is None:
        raise validation("PrimaryContainer or Containers must be specified.")
    for name in ("ModelPackageName", "MultiModelConfig", "ContainerMetricsConfig"):
        if container.get(name):
            raise validation(f"PrimaryContainer.{name} {_NOT_HERE}.")
    if container.get("Mode", "SingleModel") != "SingleModel":
        raise validation(f"PrimaryContainer.Mode {container['Mode']} {_NOT_HERE}.")
    if not container.get("Image"):
        raise validation("Image must be specified for a container without ModelPackageName.")
    if container.get("ModelDataUrl") and container.get("ModelDataSource"):
        raise validation("ModelDataUrl and ModelDataSource cannot both be specified for a container.")
    sources = container.get("AdditionalModelDataSources", [])
    channels = [source["ChannelName"] for source in sources]
    if len(set(channels)) < len(channels):
        raise validation("ChannelName must be unique among AdditionalModelDataSources.")
    for where, source in _s3_sources(container):
        _check_s3_source(where, source)


def _s3_sources(container: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    found = [
        (f"AdditionalModelDataSources channel {source['ChannelName']}", source["S3DataSource"])
        for source in container.get("AdditionalModelDataSources", [])
    ]
    if "S3DataSource" in container.get("ModelDataSource", {}):
        found.append(("ModelDataSource", container["ModelDataSource"]["S3DataSource"]))
    return found


def _check_s3_source(where: str, source: Mapping[str, Any]) -> None:
    uri, kind, compression = source["S3Uri"], source["S3DataType"], source["CompressionType"]
    if kind == "S3Prefix" and not uri.endswith("/"):
        raise validation(f"{where}: S3Uri {uri} must end with '/' when S3DataType is S3Prefix.")
    if kind == "S3Object" and uri.endswith("/"):
        raise validation(f"{where}: S3Uri {uri} must not end with '/' when S3DataType is S3Object.")
    if (kind, compression) not in {("S3Prefix", "None"), ("S3Object", "Gzip")}:
        raise validation(f"{where}: S3DataType {kind} with CompressionType {compression} {_NOT_HERE}.")
    for name in ("HubAccessConfig", "ManifestS3Uri"):
        if source.get(name):
            raise validation(f"{where}: {name} {_NOT_HERE}.")


def _check_endpoint_config(request: Mapping[str, Any]) -> None:
    for name in ("AsyncInferenceConfig", "ExplainerConfig", "ShadowProductionVariants"):
        if request.get(name):
            raise validation(f"{name} {_NOT_HERE}.")
    names = [variant["VariantName"] for variant in request["ProductionVariants"]]
    if len(set(names)) < len(names):
        raise validation("Duplicate variant names are not allowed in ProductionVariants.")
    for variant in request["ProductionVariants"]:
        _check_variant(variant)


def _check_variant(variant: Mapping[str, Any]) -> None:
    where = f"Production variant {variant['VariantName']}"
    if variant.get("ServerlessConfig"):
        raise validation(f"{where}: ServerlessConfig {_NOT_HERE}.")
    if not variant.get("ModelName"):
        raise validation(f"{where}: a variant without ModelName (inference components) {_NOT_HERE}.")
    if bool(variant.get("InstanceType")) == bool(variant.get("InstancePools")):
        raise validation(f"{where}: specify either InstanceType or InstancePools.")
    if "InitialInstanceCount" not in variant:
        raise validation(f"{where}: InitialInstanceCount must be specified.")
    priorities = [pool["Priority"] for pool in variant.get("InstancePools", [])]
    if len(set(priorities)) < len(priorities):
        raise validation(f"{where}: Priority must be unique among InstancePools.")


def _as_list(tags: dict[str, str]) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in tags.items()]
