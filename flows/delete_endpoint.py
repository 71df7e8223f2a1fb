"""Delete an endpoint with everything that deployments to it have made, so that it costs nothing any more.

Model data in S3 and the registry stay: the version can be deployed again.
"""

from __future__ import annotations

from prefect import flow

from tasks.delete_endpoint import delete_everything
from tasks.endpoint_settings import DeleteSettings
from tasks.logs import flow_logger, quiet_user_errors


@flow(
    name="delete-endpoint",
    description="Delete an endpoint with its scaling, alarms, configs and models.",
    validate_parameters=True,
)
def delete_endpoint(settings: DeleteSettings) -> tuple[str, ...]:
    """Delete an endpoint with its scaling, alarms, configs and models; returns what was deleted."""
    quiet_user_errors()
    deleted = delete_everything(settings.endpoint_name)
    flow_logger().info("deleted: %s", ", ".join(deleted) or f"nothing; there was no {settings.endpoint_name}")
    return deleted
