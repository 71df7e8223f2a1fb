"""From a fleet's spec to processes: its data downloaded, its containers' environment and arguments, the start."""

from __future__ import annotations

import time
from pathlib import Path

from containers.local.container_contract import (
    ADDITIONAL_SOURCES_FOLDER,
    MODEL_FOLDER,
    ContainerCannotStart,
    on_this_machine,
    server_arguments,
)
from containers.local.fleet_spec import FleetFailed, FleetSpec, not_healthy
from containers.local.instance import Instance, instance_environment
from containers.local.machine import Machine
from containers.local.model_data import DownloadFailed, download_model_data

_MODULE = "vllm.entrypoints.openai.api_server"


async def download_sources(spec: FleetSpec, machine: Machine, root: Path) -> None:
    """Every source of a spec into its folder, all within one time limit. What is there already is not asked for.

    Args:
        root: what the containers see as `/opt/ml`.

    Raises:
        FleetFailed: a source is missing, or does not come in time.
    """
    sources = {MODEL_FOLDER: spec.model_data} if spec.model_data else {}
    for channel, uri in spec.additional_sources.items():
        sources[f"{ADDITIONAL_SOURCES_FOLDER}/{channel}"] = uri
    deadline = time.monotonic() + spec.download_timeout_s
    (root / MODEL_FOLDER).mkdir(parents=True, exist_ok=True)
    try:
        for place, uri in sources.items():
            (root / place).parent.mkdir(parents=True, exist_ok=True)
            await download_model_data(machine, uri, root / place, deadline)
    except DownloadFailed as error:
        raise FleetFailed(str(error)) from error


def start_instance(
    spec: FleetSpec, machine: Machine, root: Path, instance_id: str, records: Path
) -> Instance:
    """Start one container as a process of this machine, without waiting for it.

    Args:
        root: what it sees as `/opt/ml`.
        instance_id: its memory is reserved already.
        records: folder of the fleet's records.

    Raises:
        FleetFailed: the container ends before its server starts, or the process cannot be made.
    """
    port = machine.free_port()
    try:
        arguments = server_arguments(spec.environment, root, port)
        environment = {name: on_this_machine(value, root) for name, value in spec.environment.items()}
        return Instance.start(
            instance_id,
            [str(machine.vllm_python), "-m", _MODULE, *arguments],
            instance_environment(environment, machine.vllm_python),
            port,
            machine.log_path(spec.endpoint_name, spec.config_name, instance_id),
            records / f"{instance_id}.json",
        )
    except (ContainerCannotStart, OSError) as error:
        machine.release(instance_id, port)
        raise not_healthy(spec, str(error)) from error
