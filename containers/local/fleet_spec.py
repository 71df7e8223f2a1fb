"""What a fleet is launched from, and how its launch fails."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class FleetSpec(BaseModel):
    """What to launch."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    fleet_id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Unique; names a folder.")
    endpoint_name: str
    config_name: str
    variant_name: str
    instance_type: str
    instance_count: int = Field(ge=0)
    image: str
    environment: dict[str, str] = Field(description="The Model's container environment.")
    model_data: str | None = Field(
        default=None,
        description="S3 URI of a prefix (ends in /) or of a .tar.gz object; becomes /opt/ml/model.",
    )
    additional_sources: dict[str, str] = Field(
        default_factory=dict,
        description="Channel name to S3 URI; becomes /opt/ml/additional-model-data-sources/CHANNEL.",
    )
    download_timeout_s: int = Field(gt=0, description="ModelDataDownloadTimeoutInSeconds.")
    startup_timeout_s: int = Field(gt=0, description="ContainerStartupHealthCheckTimeoutInSeconds.")


class FleetFailed(Exception):
    """A fleet did not come into service.

    Args:
        reason: SageMaker's own words; becomes the endpoint's FailureReason.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


def not_healthy(spec: FleetSpec, detail: str) -> FleetFailed:
    """SageMaker's one sentence for every container that did not come up, and what is known here."""
    return FleetFailed(
        f"The primary container for production variant {spec.variant_name} did not pass the ping health check. "
        f"Please check CloudWatch logs for this endpoint. (On this machine: {detail})"
    )
