"""Fleets of fake containers, real processes all: into service, out of it, lost, replaced, taken over, ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from containers.local import fleet as fleet_module
from containers.local.faults import Fault, Faults
from containers.local.fleet import Fleet, FleetFailed
from containers.local.instance import Instance, InstanceRecord
from containers.local.machine import Machine, end_instances
from tests.containers.data_plane import BUCKET, DataPlane, fleet_spec
from tests.containers.fake_container import write_fake_python
from tests.waiting import PATIENCE_S, is_alive, wait_until

CONFIG = '{"model": "/opt/ml/additional-model-data-sources/eagle", "num_speculative_tokens": 3}'


def pids(fleet: Fleet) -> list[int]:
    return [instance["pid"] for instance in fleet.describe()]


def test_a_fleet_downloads_its_channels_and_starts_vllm_by_the_containers_contract(
    plane: DataPlane, s3: Any
) -> None:
    s3.put_object(Bucket=BUCKET, Key="target/config.json", Body=b"{}")
    s3.put_object(Bucket=BUCKET, Key="drafters/7/model.safetensors", Body=b"weights")
    fleet = plane.launched(
        environment={"SM_VLLM_SPECULATIVE_CONFIG": CONFIG, "PROCESS_AUTO_RECOVERY": "false"},
        model_data=f"s3://{BUCKET}/target/",
        additional_sources={"eagle": f"s3://{BUCKET}/drafters/7/"},
    )
    (instance,) = fleet.in_service_instances()
    log = instance.record.log_path.read_text()
    arguments = json.loads(log.partition("arguments: ")[2].splitlines()[0])
    assert arguments[:2] == ["-m", "vllm.entrypoints.openai.api_server"]
    model = Path(arguments[arguments.index("--model") + 1])
    drafter = json.loads(arguments[arguments.index("--speculative-config") + 1])["model"]
    assert (model / "config.json").read_bytes() == b"{}"
    assert Path(drafter, "model.safetensors").read_bytes() == b"weights"
    assert instance.record.log_path.parent == plane.machine.home / "logs" / "fledge"


def test_an_instance_sees_no_credentials_and_waits_without_burning_a_core(plane: DataPlane) -> None:
    fleet = plane.launched(environment={"SM_VLLM_MODEL": "m", "HF_HOME": "/opt/ml/model/hub"})
    environment = psutil.Process(pids(fleet)[0]).environ()
    assert not [name for name in environment if name.startswith(("AWS_", "PREFECT_", "MLFLOW_"))]
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert environment["KMP_BLOCKTIME"] == "0"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["HF_HOME"] == str(fleet.container_root / "model" / "hub")


@pytest.mark.parametrize(
    ("environment", "startup_timeout_s", "detail"),
    [
        ({"FAKE_NEVER_HEALTHY": "true"}, 1, "no answer within 1 s"),
        ({"FAKE_EXIT_AT_START": "true"}, PATIENCE_S, "its process ended"),
        ({"SM_VLLM_CHAT_TEMPLATE": "{% x %}"}, PATIENCE_S, "supervisord"),
    ],
)
def test_a_container_that_never_answers_fails_the_fleet_in_sagemakers_words(
    plane: DataPlane, environment: dict[str, str], startup_timeout_s: float, detail: str
) -> None:
    fleet = plane.fleet(environment=environment, startup_timeout_s=startup_timeout_s)
    with pytest.raises(FleetFailed, match="did not pass the ping health check") as failed:
        plane.run(fleet.launch())
    assert "The primary container for production variant AllTraffic" in failed.value.reason
    assert detail in failed.value.reason
    assert fleet.describe() == []
    assert plane.machine.reserved_gb == 0
    assert not end_instances(plane.machine.home)


def test_missing_model_data_fails_the_fleet_in_sagemakers_words(plane: DataPlane, s3: Any) -> None:
    fleet = plane.fleet(model_data=f"s3://{BUCKET}/nothing/here/")
    with pytest.raises(FleetFailed, match=f'Failed to download model data .*"s3://{BUCKET}/nothing/here/"'):
        plane.run(fleet.launch())


def test_two_fleets_fit_the_third_finds_no_capacity_until_one_has_gone(tmp_path: Path, aws: str) -> None:
    plane = DataPlane(tmp_path / "sagemaker", memory_gb=9.0)
    try:
        first, _ = plane.launched(), plane.launched()
        third = plane.fleet()
        with pytest.raises(FleetFailed, match="InsufficientInstanceCapacity"):
            plane.run(third.launch())
        plane.run(first.stop(drain_s=0))
        plane.run(third.launch())
        assert third.in_service_instances()
    finally:
        plane.close()


def test_a_machine_without_enough_free_memory_has_no_capacity(
    plane: DataPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(plane.machine.home, vllm_python=plane.machine.vllm_python)
    monkeypatch.setattr("containers.local.machine._free_memory_gb", lambda: 1.0)
    fleet = Fleet(fleet_spec(), machine, Faults())
    with pytest.raises(FleetFailed, match=r"1\.0 GiB free"):
        plane.run(fleet.launch())


def test_capacity_and_slow_start_and_ping_failure_can_be_ordered(plane: DataPlane) -> None:
    plane.faults.order(Fault(kind="capacity", config="config-1", times=1))
    with pytest.raises(FleetFailed, match="InsufficientInstanceCapacity"):
        plane.run(plane.fleet().launch())
    plane.faults.order(Fault(kind="slow_start", delay_s=2, times=1))
    started = time.monotonic()
    plane.launched()
    assert time.monotonic() - started > 2
    plane.faults.order(Fault(kind="ping_failure", config="config-9"))
    plane.launched()
    with pytest.raises(FleetFailed, match="ping health check"):
        plane.run(plane.fleet(config_name="config-9", startup_timeout_s=1).launch())


def test_a_killed_instance_leaves_the_routing_and_is_replaced(plane: DataPlane) -> None:
    fleet = plane.launched(instance_count=2)
    watching = plane.start(fleet.watch())
    (killed, other) = pids(fleet)
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: [i.record.pid for i in fleet.in_service_instances()] == [other])
    wait_until(lambda: len(fleet.in_service_instances()) == 2)
    assert killed not in pids(fleet)
    assert plane.machine.reserved_gb == 9.0
    watching.cancel()


def test_an_instance_that_hangs_is_replaced(plane: DataPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "FAILED_PINGS_UNHEALTHY", 1)
    monkeypatch.setattr(fleet_module, "FAILED_PINGS_REPLACED", 2)
    fleet = plane.launched()
    watching = plane.start(fleet.watch())
    (hung,) = pids(fleet)
    os.kill(hung, signal.SIGSTOP)
    wait_until(lambda: not fleet.in_service_instances())
    wait_until(lambda: fleet.in_service_instances())
    assert not is_alive(hung)
    watching.cancel()


def test_an_instance_that_pauses_comes_back_without_being_replaced(
    plane: DataPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "FAILED_PINGS_UNHEALTHY", 1)
    fleet = plane.launched()
    watching = plane.start(fleet.watch())
    (paused,) = pids(fleet)
    os.kill(paused, signal.SIGSTOP)
    wait_until(lambda: not fleet.in_service_instances())
    os.kill(paused, signal.SIGCONT)
    wait_until(lambda: fleet.in_service_instances())
    assert pids(fleet) == [paused]
    watching.cancel()


def test_a_fleet_grows_and_shrinks(plane: DataPlane) -> None:
    fleet = plane.launched()
    plane.run(fleet.scale(3))
    assert len(fleet.in_service_instances()) == 3
    plane.run(fleet.scale(1))
    assert len(fleet.in_service_instances()) == len(pids(fleet)) == 1
    assert plane.machine.reserved_gb == 4.5


def test_stopping_waits_for_requests_in_flight_and_takes_no_new_one(plane: DataPlane) -> None:
    fleet = plane.launched()
    (instance,) = fleet.in_service_instances()
    instance.in_flight = 1
    stopping = plane.start(fleet.stop(drain_s=PATIENCE_S))
    wait_until(lambda: not fleet.in_service_instances())
    time.sleep(0.3)
    assert is_alive(instance.record.pid)
    instance.in_flight = 0
    stopping.result(PATIENCE_S)
    assert not is_alive(instance.record.pid)
    assert not fleet.folder.exists()


def test_everything_that_an_instance_started_ends_with_it_even_after_its_leader_was_killed(
    plane: DataPlane, tmp_path: Path
) -> None:
    wrapper = tmp_path / "python-with-a-child"
    wrapper.write_text(f'#!/bin/sh\nsleep 1000 &\nexec "{plane.machine.vllm_python}" "$@"\n')
    wrapper.chmod(0o755)
    machine = Machine(plane.machine.home, memory_gb=100, vllm_python=wrapper)
    fleet = Fleet(fleet_spec(), machine, Faults())
    plane.run(fleet.launch())
    leader = psutil.Process(pids(fleet)[0])
    (child,) = leader.children()
    leader.kill()
    plane.run(fleet.stop(drain_s=0))
    assert not is_alive(child.pid)


START_AND_WAIT = """
import asyncio, json, sys
from pathlib import Path
from containers.local.faults import Faults
from containers.local.fleet import Fleet, FleetSpec
from containers.local.machine import Machine
async def main(home, python, spec):
    fleet = Fleet(FleetSpec.model_validate_json(spec), Machine(Path(home), 100, vllm_python=Path(python)), Faults())
    await fleet.launch()
    print(json.dumps([instance["pid"] for instance in fleet.describe()]), flush=True)
    await asyncio.sleep(1000)
asyncio.run(main(*sys.argv[1:]))
"""


def start_server_and_kill_it(home: Path, spec: Any) -> list[int]:
    """A process launches a fleet and is killed; the pids of its instances."""
    home.mkdir(parents=True, exist_ok=True)
    server = subprocess.Popen(
        [sys.executable, "-c", START_AND_WAIT, home, write_fake_python(home), spec.model_dump_json()],
        stdout=subprocess.PIPE,
    )
    assert server.stdout is not None
    started = json.loads(server.stdout.readline())
    server.kill()
    server.wait()
    return list(started)


def test_instances_outlive_a_killed_server_and_the_next_one_takes_them_over(plane: DataPlane) -> None:
    spec = fleet_spec(instance_count=2)
    started = start_server_and_kill_it(plane.machine.home, spec)
    assert all(is_alive(pid) for pid in started)
    fleet = plane.fleet(spec)
    assert fleet.adopt()
    assert sorted(pids(fleet)) == sorted(started)
    assert len(fleet.in_service_instances()) == 2  # routed to at once
    assert plane.machine.reserved_gb == 9.0
    plane.run(fleet.launch())  # nothing left to do
    assert sorted(pids(fleet)) == sorted(started)
    plane.run(fleet.stop(drain_s=0))
    assert not any(is_alive(pid) for pid in started)


def test_of_a_fleet_that_lost_some_the_rest_is_taken_over_and_launching_brings_it_back_to_its_number(
    plane: DataPlane,
) -> None:
    spec = fleet_spec(instance_count=2)
    killed, left = start_server_and_kill_it(plane.machine.home, spec)
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: not is_alive(killed))
    fleet = plane.fleet(spec)
    assert fleet.adopt()
    assert pids(fleet) == [left]
    plane.run(fleet.launch())
    assert len(fleet.in_service_instances()) == 2


def test_end_instances_ends_what_a_killed_server_left_behind(plane: DataPlane) -> None:
    started = start_server_and_kill_it(plane.machine.home, fleet_spec())
    assert end_instances(plane.machine.home) == 1
    assert not any(is_alive(pid) for pid in started)
    assert end_instances(plane.machine.home) == 0
    assert not plane.fleet(fleet_spec()).adopt()


def test_a_process_whose_server_was_killed_before_it_wrote_its_record_is_ended(plane: DataPlane) -> None:
    spec = fleet_spec()
    (started,) = start_server_and_kill_it(plane.machine.home, spec)
    for record in (plane.machine.fleet_folder(spec.fleet_id) / "instances").glob("*.json"):
        record.unlink()
    assert not plane.fleet(spec).adopt()
    wait_until(lambda: not is_alive(started))


def test_an_instance_that_is_drained_gets_no_request_though_it_answers_pings(plane: DataPlane) -> None:
    fleet = plane.launched(instance_count=2)
    watching = plane.start(fleet.watch())
    busy, free = fleet.in_service_instances()
    busy.in_flight = free.in_flight = 1
    scaling = plane.start(fleet.scale(1))
    wait_until(lambda: len(fleet.in_service_instances()) == 1)
    time.sleep(1.5)  # a look or two of watch
    assert len(fleet.in_service_instances()) == 1
    busy.in_flight = free.in_flight = 0
    scaling.result(PATIENCE_S)
    assert len(pids(fleet)) == 1
    watching.cancel()


def test_a_process_that_only_has_the_number_of_an_instance_is_left_alone(tmp_path: Path) -> None:
    stranger = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    try:
        record = InstanceRecord(
            instance_id="i-1",
            pid=stranger.pid,
            process_identity="another boot:1",
            port=1,
            log_path=tmp_path / "log",
            started_at="2026-01-01T00:00:00Z",
        )
        instance = Instance(record, tmp_path / "i-1.json")
        assert not instance.is_alive()
        instance.end_now()
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_cancelled_launch_leaves_no_process(plane: DataPlane) -> None:
    fleet = plane.fleet(environment={"FAKE_NEVER_HEALTHY": "true"}, startup_timeout_s=2 * PATIENCE_S)
    launching = plane.start(fleet.launch())
    wait_until(lambda: fleet.describe())
    (pid,) = pids(fleet)
    launching.cancel()
    wait_until(lambda: not is_alive(pid))
    wait_until(lambda: plane.machine.reserved_gb == 0)


def test_a_fleet_stopped_with_its_files_kept_launches_again_without_s3(plane: DataPlane, s3: Any) -> None:
    s3.put_object(Bucket=BUCKET, Key="kept/config.json", Body=b"{}")
    spec = fleet_spec(model_data=f"s3://{BUCKET}/kept/")
    fleet = plane.fleet(spec)
    plane.run(fleet.launch())
    plane.run(fleet.stop(drain_s=0, keep_files=True))
    s3.delete_object(Bucket=BUCKET, Key="kept/config.json")
    again = plane.fleet(spec)
    assert not again.adopt()
    plane.run(again.launch())
    assert again.in_service_instances()
