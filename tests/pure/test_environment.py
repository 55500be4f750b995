"""Place: what each launcher's variables mean, and which are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import MisuseError
from phalanx.launch.environment import (
    Launcher,
    Place,
    child_environment,
    first_host,
    requested_threads,
    visible_cuda_devices,
)

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "abc",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_NNODES": "4",
    "SLURM_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[007-009,12],login",
    "SLURM_JOB_ID": "4711",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


def test_no_launcher_is_a_world_of_one() -> None:
    assert Place.from_environment({"MASTER_ADDR": "left-over", "HOME": "/"}) == Place(rank=0, world_size=1)


def test_torchrun() -> None:
    assert Place.from_environment(TORCHRUN) == Place(
        rank=3,
        world_size=4,
        local_rank=1,
        local_world_size=2,
        node_rank=1,
        num_nodes=2,
        master_addr="node0",
        master_port=29500,
        launcher=Launcher.TORCHRUN,
        run_id="abc",
        restart_count=2,
        agent_store=True,
    )


def test_rank_and_world_size_alone_mean_one_host() -> None:
    place = Place.from_environment({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"})
    assert (place.local_rank, place.local_world_size, place.num_nodes) == (1, 2, 1)


def test_slurm() -> None:
    place = Place.from_environment(SLURM)
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (5, 7, 1, 2)
    assert (place.node_rank, place.num_nodes, place.master_addr) == (2, 4, "gpu007")
    assert (place.launcher, place.address_from) == (Launcher.SLURM, "SLURM_STEP_NODELIST")


def test_slurm_port_is_equal_on_all_ranks_and_differs_between_jobs_and_steps() -> None:
    def port(**changed: str) -> int | None:
        return Place.from_environment({**SLURM, **changed}).master_port

    assert port() == port(SLURM_PROCID="0")
    assert len({port(), port(SLURM_JOB_ID="4712"), port(SLURM_STEP_ID="1"), port(MASTER_PORT="77")}) == 4
    assert port(MASTER_PORT="77") == 77


def test_a_slurm_batch_script_without_srun_is_no_launcher() -> None:
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "gpu1", "SLURM_JOB_ID": "1"}
    assert Place.from_environment(batch).launcher is Launcher.NONE


def test_openmpi() -> None:
    place = Place.from_environment(OPENMPI)
    assert (place.rank, place.world_size, place.local_rank, place.master_addr) == (1, 2, 1, "127.0.0.1")
    assert place.launcher is Launcher.OPENMPI


def test_torchruns_variables_win_over_slurms_and_openmpis() -> None:
    assert Place.from_environment({**SLURM, **OPENMPI, **TORCHRUN}).launcher is Launcher.TORCHRUN


@pytest.mark.parametrize(
    ("base", "changed", "named"),
    [
        (TORCHRUN, {"WORLD_SIZE": None}, "WORLD_SIZE is not"),
        (TORCHRUN, {"RANK": None}, "RANK is not"),
        (TORCHRUN, {"RANK": "4"}, "RANK=4"),
        (TORCHRUN, {"RANK": "-1"}, "RANK=-1"),
        (TORCHRUN, {"RANK": "one"}, "RANK='one'"),
        (TORCHRUN, {"WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
        (TORCHRUN, {"LOCAL_RANK": "2"}, "LOCAL_RANK=2"),
        (TORCHRUN, {"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE=5"),
        (TORCHRUN, {"MASTER_ADDR": None}, "MASTER_ADDR is not"),
        (TORCHRUN, {"MASTER_PORT": None}, "MASTER_PORT is not"),
        (TORCHRUN, {"MASTER_PORT": "70000"}, "MASTER_PORT=70000"),
        ({}, {"LOCAL_RANK": "0"}, "RANK is not"),
        (SLURM, {"SLURM_PROCID": None}, "SLURM_PROCID is not"),
        (SLURM, {"SLURM_NTASKS": None}, "SLURM_NTASKS is not"),
        (SLURM, {"SLURM_PROCID": "7"}, "SLURM_PROCID=7"),
        (SLURM, {"SLURM_STEP_NODELIST": None}, "SLURM_STEP_NODELIST is not"),
        (SLURM, {"SLURM_LOCALID": None}, "SLURM_LOCALID is not"),
        (OPENMPI, {"OMPI_COMM_WORLD_SIZE": None}, "OMPI_COMM_WORLD_SIZE is not"),
        (OPENMPI, {"OMPI_COMM_WORLD_RANK": None}, "OMPI_COMM_WORLD_RANK is not"),
        (
            OPENMPI,
            {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
            "MASTER_ADDR is not set",
        ),
    ],
)
def test_half_set_and_contradictory_variables_are_named(
    base: dict[str, str], changed: dict[str, str | None], named: str
) -> None:
    env = {name: value for name, value in {**base, **changed}.items() if value is not None}
    with pytest.raises(MisuseError) as caught:
        Place.from_environment(env)
    assert named in str(caught.value)


@st.composite
def places(draw: st.DrawFn) -> Place:
    nodes, local = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    node, local_rank = draw(st.integers(0, nodes - 1)), draw(st.integers(0, local - 1))
    return Place(
        rank=node * local + local_rank,
        world_size=nodes * local,
        local_rank=local_rank,
        local_world_size=local,
        node_rank=node,
        num_nodes=nodes,
        master_addr="10.0.0.1",
        master_port=draw(st.integers(1, 65535)),
        launcher=Launcher.PHALANX,
        run_id="r1",
        restart_count=draw(st.integers(0, 3)),
    )


@given(places())
def test_a_place_survives_its_variables(place: Place) -> None:
    assert Place.from_environment(place.variables()) == place


def test_child_environment_sets_threads_and_keeps_the_rest() -> None:
    env = child_environment(Place(), 3, {"HOME": "/h", "RANK": "9", "OMP_NUM_THREADS": "8"})
    assert (env["HOME"], env["RANK"], env["OMP_NUM_THREADS"]) == ("/h", "0", "3")


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node1", "node1"),
        ("a,b", "a"),
        ("gpu[003-005,9],x", "gpu003"),
        ("gpu[7]", "gpu7"),
        ("r[1-2]n[08-10]", "r1n08"),
        ("a[2,4-5]-ib,b", "a2-ib"),
    ],
)
def test_first_host(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


def test_requested_threads() -> None:
    assert requested_threads({}) is None
    assert requested_threads({"OMP_NUM_THREADS": "4,2"}) == 4
    with pytest.raises(MisuseError, match="OMP_NUM_THREADS"):
        requested_threads({"OMP_NUM_THREADS": "many"})


def test_visible_cuda_devices() -> None:
    assert visible_cuda_devices(4, {}) == 4
    assert visible_cuda_devices(4, {"CUDA_VISIBLE_DEVICES": "0, 2"}) == 2
    assert visible_cuda_devices(4, {"CUDA_VISIBLE_DEVICES": ""}) == 0
    assert visible_cuda_devices(4, {"CUDA_VISIBLE_DEVICES": "1,-1,2"}) == 1
