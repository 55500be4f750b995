"""Where this process stands in the world: the launcher's variables, read once into a frozen `Place`.

This is the only file that reads `os.environ`. Four launchers are understood, the first that has set
its variables wins: `phalanx run`, `phalanx.spawn` and torchrun (RANK, WORLD_SIZE, ...), Slurm
(SLURM_PROCID, ... inside a job step), Open MPI (OMPI_COMM_WORLD_*). Without any of them the process
is rank 0 of 1. Variables that are half set or contradict each other are an error that names the
variable: training on silently as a world of one is the worst outcome there is.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from phalanx.errors import MisuseError

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 29500
DROP_IN = "PHALANX_DROPIN"
RESUME = "PHALANX_RESUME"
DROP_IN_SAID = "PHALANX_DROPIN_SAID"  # set by the process that has said what is replaced, for its children
REPLACEABLE = ("ddp", "syncbn", "sampler", "gloo")
_FIRST_DERIVED_PORT = 10000  # below the range from which kernels hand out free ports
_DERIVED_PORTS = 20000
_PORT_STEP = 997  # keeps the steps of one Slurm job on ports of their own


class Launcher(str, Enum):
    """Who started this process."""

    PHALANX = "phalanx"
    TORCHRUN = "torchrun"
    SLURM = "slurm"
    OPENMPI = "openmpi"
    NONE = "none"


@dataclass(frozen=True)
class Place:
    """One process's place in the world.

    `address_from` and `port_from` name the variables that `master_addr` and `master_port` came from,
    for error texts. `agent_store` means that the launcher itself serves the store (torchrun), so that
    rank 0 must not. Where a launcher does not say on which host a rank is, node fields are a guess
    from the ranks per host; what depends on shared memory must ask the links instead. `resume` is where
    the run goes on from: "auto", a checkpoint, or empty; see phalanx.checkpoint.resume.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    master_addr: str | None = None
    master_port: int | None = None
    launcher: Launcher = Launcher.NONE
    run_id: str = ""
    restart_count: int = 0
    agent_store: bool = False
    address_from: str = "MASTER_ADDR"
    port_from: str = "MASTER_PORT"
    resume: str = ""

    @classmethod
    def from_environment(cls, env: Mapping[str, str] = os.environ) -> Place:
        """Read the launcher's variables; rank 0 of 1 where there are none.

        Raises MisuseError, naming the variable, where they are half set or contradict each other.
        """
        return replace(cls._launched(env), resume=env.get(RESUME, ""))

    @classmethod
    def _launched(cls, env: Mapping[str, str]) -> Place:
        if "RANK" in env or "WORLD_SIZE" in env:
            return _from_torchrun(env)
        if "SLURM_STEP_NODELIST" in env or "SLURM_STEP_ID" in env or env.get("SLURM_PROCID", "0") != "0":
            return _from_slurm(env)
        if any(name.startswith("OMPI_COMM_WORLD_") for name in env):
            return _from_openmpi(env)
        if "LOCAL_RANK" in env:
            raise _half_set("LOCAL_RANK", "RANK")
        return cls()

    def variables(self) -> dict[str, str]:
        """What torchrun would set for this place, and our own; `from_environment` reads it back."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.node_rank),
            "GROUP_WORLD_SIZE": str(self.num_nodes),
            "ROLE_NAME": "default",
            "ROLE_RANK": str(self.rank),
            "ROLE_WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": str(self.master_addr),
            "MASTER_PORT": str(self.master_port),
            "TORCHELASTIC_RUN_ID": self.run_id,
            "TORCHELASTIC_RESTART_COUNT": str(self.restart_count),
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": str(self.agent_store),
            "PHALANX_RUN_ID": self.run_id,
            **({RESUME: self.resume} if self.resume else {}),
        }


def child_environment(place: Place, threads: int, env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a rank: this process's, with the variables of `place` and the number of threads."""
    return {**env, **place.variables(), "OMP_NUM_THREADS": str(threads)}


def requested_threads(env: Mapping[str, str] = os.environ) -> int | None:
    """The user's OMP_NUM_THREADS, or None. A list (one number per nesting level) counts by its first."""
    text = env.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if not text:
        return None
    return _integer({"OMP_NUM_THREADS": text}, "OMP_NUM_THREADS", least=1)


def slow_after(env: Mapping[str, str] = os.environ) -> float:
    """Seconds after which a wait for other ranks is reported: PHALANX_SLOW_AFTER, or ten; `inf` for never."""
    text = env.get("PHALANX_SLOW_AFTER", "").strip() or "10"
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise MisuseError(f"PHALANX_SLOW_AFTER={text} is no positive number of seconds", "PHALANX_SLOW_AFTER=30")
    return seconds


def drop_in(text: str) -> tuple[str, ...]:
    """Read a list of what to replace of torch: `ddp,gloo`; `all` or 1 is all of it, empty or 0 nothing.

    Raises MisuseError for a name that is not in REPLACEABLE.
    """
    names = [name.strip().lower() for name in text.split(",") if name.strip()]
    if names in (["1"], ["all"], ["true"]):
        return REPLACEABLE
    if names in ([], ["0"], ["false"]):
        return ()
    for name in names:
        if name not in REPLACEABLE:
            raise MisuseError(
                f"drop-in {name!r} is not known", f"some of {','.join(REPLACEABLE)} or all, as in {DROP_IN}=ddp,gloo"
            )
    return tuple(name for name in REPLACEABLE if name in names)


def variable(name: str, default: str, env: Mapping[str, str] = os.environ) -> str:
    """Read one variable; an empty one is as none."""
    return env.get(name) or default


def visible_cuda_devices(present: int, env: Mapping[str, str] = os.environ) -> int:
    """How many of the `present` CUDA devices CUDA_VISIBLE_DEVICES leaves; what follows a -1 is hidden."""
    text = env.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return present
    names = [name.strip() for name in text.split(",") if name.strip()]
    if "-1" in names:
        names = names[: names.index("-1")]
    return min(present, len(names))


def _from_torchrun(env: Mapping[str, str]) -> Place:
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if name not in env:
            raise _half_set(other, name)
    world_size = _integer(env, "WORLD_SIZE", least=1)
    rank = _below(env, "RANK", world_size, "WORLD_SIZE")
    if world_size > 1:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not env.get(name):
                raise _half_set("WORLD_SIZE", name)
    local_rank, local_world_size = _local(env, rank, world_size)
    num_nodes = _integer(env, "GROUP_WORLD_SIZE", least=1, default=-(-world_size // local_world_size))
    return Place(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=_integer(env, "GROUP_RANK", least=0, default=rank // local_world_size),
        num_nodes=num_nodes,
        master_addr=env.get("MASTER_ADDR") or None,
        master_port=_port(env),
        launcher=Launcher.PHALANX if "PHALANX_RUN_ID" in env else Launcher.TORCHRUN,
        run_id=env.get("PHALANX_RUN_ID") or env.get("TORCHELASTIC_RUN_ID", ""),
        restart_count=_integer(env, "TORCHELASTIC_RESTART_COUNT", least=0, default=0),
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _local(env: Mapping[str, str], rank: int, world_size: int) -> tuple[int, int]:
    """Local rank and local world size. People who set RANK by hand often leave them out."""
    if "LOCAL_WORLD_SIZE" in env:
        local_world_size = _integer(env, "LOCAL_WORLD_SIZE", least=1)
        if local_world_size > world_size:
            raise _contradiction("LOCAL_WORLD_SIZE", local_world_size, "WORLD_SIZE", world_size)
        if "LOCAL_RANK" in env:
            return _below(env, "LOCAL_RANK", local_world_size, "LOCAL_WORLD_SIZE"), local_world_size
        return rank % local_world_size, local_world_size
    if "LOCAL_RANK" in env:
        local_rank = _below(env, "LOCAL_RANK", world_size, "WORLD_SIZE")
        return local_rank, world_size if local_rank == rank else local_rank + 1
    one_host = env.get("MASTER_ADDR", LOOPBACK) in (LOOPBACK, "localhost", "::1")
    return (rank, world_size) if one_host else (0, 1)


def _from_slurm(env: Mapping[str, str]) -> Place:
    total = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    for name, other in (("SLURM_PROCID", total), (total, "SLURM_PROCID")):
        if name not in env:
            raise _half_set(other if other in env else "SLURM_STEP_NODELIST", name)
    world_size = _integer(env, total, least=1)
    rank = _below(env, "SLURM_PROCID", world_size, total)
    node_rank = _integer(env, "SLURM_NODEID", least=0, default=0)
    local_rank = _integer(env, "SLURM_LOCALID", least=0, default=rank if world_size == 1 else None)
    lists = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    address_from = next((name for name in ("MASTER_ADDR", *lists) if env.get(name)), None)
    if address_from is None and world_size > 1:
        raise _half_set("SLURM_PROCID", "SLURM_STEP_NODELIST")
    listed = env.get(address_from, LOOPBACK) if address_from else LOOPBACK
    nodes = "SLURM_STEP_NUM_NODES" if "SLURM_STEP_NUM_NODES" in env else "SLURM_NNODES"
    return Place(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=_tasks_on_node(env, node_rank, least=local_rank + 1, most=world_size),
        node_rank=node_rank,
        num_nodes=_integer(env, nodes, least=1, default=1),
        master_addr=listed if address_from == "MASTER_ADDR" else first_host(listed),
        master_port=_port(env) or _slurm_port(env),
        launcher=Launcher.SLURM,
        run_id=env.get("SLURM_JOB_ID", ""),
        restart_count=_integer(env, "SLURM_RESTART_COUNT", least=0, default=0),
        address_from=address_from or "MASTER_ADDR",
        port_from="MASTER_PORT" if env.get("MASTER_PORT") else "SLURM_JOB_ID",
    )


def _slurm_port(env: Mapping[str, str]) -> int:
    """The same port on every rank of a job step, another one for another job or step."""
    job = _integer(env, "SLURM_JOB_ID", least=0, default=0)
    step = env.get("SLURM_STEP_ID", "0")
    number = int(step) if step.isdigit() else 0
    return _FIRST_DERIVED_PORT + (job + _PORT_STEP * number) % _DERIVED_PORTS


def _tasks_on_node(env: Mapping[str, str], node: int, least: int, most: int) -> int:
    """The number of tasks on a node out of Slurm's `2(x3),1`: two on each of three nodes, then one."""
    text = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE", "")
    counts: list[int] = []
    for tasks, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(tasks)] * int(repeat or 1)
    if node < len(counts):
        return counts[node]
    return max(least, most if _integer(env, "SLURM_NNODES", least=1, default=1) == 1 else least)


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list: `gpu[003-005,9],login` gives `gpu003`."""
    depth, end = 0, len(nodelist)
    for i, char in enumerate(nodelist):
        depth += (char == "[") - (char == "]")
        if char == "," and depth == 0:
            end = i
            break
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", nodelist[:end]).strip()


def _from_openmpi(env: Mapping[str, str]) -> Place:
    prefix = "OMPI_COMM_WORLD_"
    for name in ("RANK", "SIZE"):
        if prefix + name not in env:
            raise _half_set(prefix + ("SIZE" if name == "RANK" else "RANK"), prefix + name)
    world_size = _integer(env, prefix + "SIZE", least=1)
    rank = _below(env, prefix + "RANK", world_size, prefix + "SIZE")
    local_size = _integer(env, prefix + "LOCAL_SIZE", least=1, default=world_size)
    if local_size > world_size:
        raise _contradiction(prefix + "LOCAL_SIZE", local_size, prefix + "SIZE", world_size)
    local_rank = rank % local_size
    if prefix + "LOCAL_RANK" in env:
        local_rank = _below(env, prefix + "LOCAL_RANK", local_size, prefix + "LOCAL_SIZE")
    if local_size < world_size and not env.get("MASTER_ADDR"):
        raise MisuseError(
            f"this mpirun job spans several hosts ({prefix}LOCAL_SIZE={local_size} of "
            f"{prefix}SIZE={world_size}) and MASTER_ADDR is not set",
            "mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=29500 python script.py",
            rank,
        )
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid", "")
    derived = _FIRST_DERIVED_PORT + zlib.crc32(job.encode()) % _DERIVED_PORTS if job else DEFAULT_PORT
    return Place(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_size,
        node_rank=rank // local_size,
        num_nodes=-(-world_size // local_size),
        master_addr=env.get("MASTER_ADDR") or LOOPBACK,
        master_port=_port(env) or derived,
        launcher=Launcher.OPENMPI,
        run_id=job,
    )


def _port(env: Mapping[str, str]) -> int | None:
    if not env.get("MASTER_PORT"):
        return None
    port = _integer(env, "MASTER_PORT", least=1)
    if port > 65535:
        raise MisuseError(f"MASTER_PORT={port} is no port: ports end at 65535", "MASTER_PORT=29500")
    return port


def _integer(env: Mapping[str, str], name: str, least: int, default: int | None = None) -> int:
    text = env.get(name)
    if text is None:
        if default is None:
            raise MisuseError(f"{name} is not set, and this process's place in the world is unknown without it")
        return default
    try:
        value = int(text)
    except ValueError:
        raise MisuseError(f"{name}={text!r} is not an integer", f"{name}={max(least, 1)}") from None
    if value < least:
        raise MisuseError(f"{name}={value} is below {least}", f"{name}={least}")
    return value


def _below(env: Mapping[str, str], name: str, limit: int, limit_name: str) -> int:
    value = _integer(env, name, least=0)
    if value >= limit:
        raise MisuseError(
            f"{name}={value} but {limit_name}={limit}: it must be 0 to {limit - 1}", f"{name}={limit - 1}"
        )
    return value


def _half_set(present: str, missing: str) -> MisuseError:
    return MisuseError(
        f"{present} is set but {missing} is not, so the place of this process in the world is unknown",
        f"set {missing} too, or start the script with `phalanx run -n 2 script.py`, "
        f"or unset {present} to run as one process",
    )


def _contradiction(name: str, value: int, other: str, limit: int) -> MisuseError:
    return MisuseError(f"{name}={value} is more than {other}={limit}", f"{name}={limit}")
