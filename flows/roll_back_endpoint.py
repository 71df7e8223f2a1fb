"""An endpoint back on the config that it ran before, at a person's or the monitor's word.

Run again after a kill, it completes what was begun: traffic first, then tags and aliases of the registry.
"""

from __future__ import annotations

from prefect import flow

from tasks.endpoint_settings import EndpointRecord, RollBackSettings
from tasks.endpoints import describe_endpoint
from tasks.logs import quiet_user_errors
from tasks.promotion import restore_champion
from tasks.roll_back import close_roll_back, move_traffic_back, open_roll_back, verify_fleet


@flow(
    name="roll-back-endpoint",
    description="Take an endpoint back to the config that it ran before, with version tags and aliases.",
    validate_parameters=True,
)
def roll_back_endpoint(settings: RollBackSettings) -> EndpointRecord:
    """Take an endpoint back to the config that it ran before, with version tags and aliases."""
    quiet_user_errors()
    way = open_roll_back(settings.endpoint_name)
    move_traffic_back(way, settings.termination_wait_s)
    verify_fleet(way)
    if way.version is not None:
        restore_champion(way.version, settings.reason)
    close_roll_back(way)
    return describe_endpoint(settings.endpoint_name)
