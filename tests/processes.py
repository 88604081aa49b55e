"""Several processes for tests: gloo on machines without GPUs, NCCL if there is a GPU for each process."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import distributed
from torch.multiprocessing.spawn import ProcessException, start_processes

from moe_kernels.runtime.triton import HAS_TRITON

from .one_thread import OneThread

ROOT = Path(__file__).parents[1]
# Imported once, in a process from which the others are forked, because these imports take longer than the tests.
PRELOADED = [
    "pytest",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "moe_layers",
]
# Timeout of a collective, after which a waiting rank fails instead of hanging. On GPUs, every rank compiles kernels
# between two collectives.
TIMEOUT, GPU_TIMEOUT = timedelta(seconds=60), timedelta(seconds=300)

eight_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 8, reason="needs 8 GPUs; with eight processes of gloo it takes two cores minutes"
)


def skip_without_gpus_for(num_processes: int) -> None:
    if torch.cuda.is_available() and torch.cuda.device_count() < num_processes:
        pytest.skip(f"needs {num_processes} GPUs, or none, got {torch.cuda.device_count()}")


def run_cases(cases: list[Callable], num_processes: int, folder: Path) -> dict[str, str]:
    """Call each `case(device)`, in turn, on every rank of a group.

    Returns:
        the error and its rank by name of the case. Cases after the first failure do not run.
    """
    skip_without_gpus_for(num_processes)
    arguments = (cases, num_processes, str(folder))
    multiprocessing.set_forkserver_preload(PRELOADED)
    # Initialising CUDA before a fork would break it afterwards.
    method = "spawn" if torch.cuda.is_available() else "forkserver"
    try:
        start_processes(_run, arguments, nprocs=num_processes, start_method=method)
    except ProcessException:
        if not list(folder.glob("*.failed")):
            raise
    return {case.__name__: _failure(folder, case.__name__) for case in cases}


def on_cpu(reason: str) -> pytest.MarkDecorator:
    """Return a mark of a test, or of a case of `make_test`, that is skipped where there is a GPU."""
    return pytest.mark.skipif(torch.cuda.is_available(), reason=f"computes on CPUs, with gloo: {reason}")


def make_test(cases: list[Callable], num_processes: int) -> Callable:
    """Return a test with one parameter per case. The first one runs all cases, in one group of processes. A case may
    have marks of `pytest.mark.skipif`."""
    failures: dict[str, str] = {}
    marks = {case.__name__: getattr(case, "pytestmark", []) for case in cases}
    running = [case for case in cases if not any(mark.args[0] for mark in marks[case.__name__])]

    @pytest.mark.parametrize(
        "case", [pytest.param(case, id=case.__name__, marks=marks[case.__name__]) for case in cases]
    )
    def test(case, tmp_path_factory):
        if not failures:
            failures.update(run_cases(running, num_processes, tmp_path_factory.mktemp("processes")))
        assert not failures[case.__name__], failures[case.__name__]

    return test


def shared_folder() -> Path:
    """Return a new folder, the same one on every rank."""
    folder = [tempfile.mkdtemp() if distributed.get_rank() == 0 else None]
    distributed.broadcast_object_list(folder)
    return Path(folder[0])


def run_python(
    arguments: list, cwd: Path = ROOT, interpret: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a Python process, by default without Triton's interpreter. Fail with its output if it fails."""
    # PYTHONPATH may lead to another Triton.
    paths = [ROOT, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, paths)), **environment}
    if not interpret:
        variables.pop("TRITON_INTERPRET", None)
    command = [sys.executable, *map(str, arguments)]
    result = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=1800)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return result


def run_torchrun(arguments: list[str], num_processes: int, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a script, or a module after -m, as a user would start it in several processes. Gloo has one thread in each.
    Fail with the output if a process fails."""
    skip_without_gpus_for(num_processes)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", num_processes]
    # With the fault handler, an aborted process prints what it ran.
    environment = {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    return run_python([*launcher, "-m", "tests.one_thread", *arguments], cwd, **environment)


@contextmanager
def gloo_group(folder: Path, rank: int = 0, num_processes: int = 1, timeout: timedelta = TIMEOUT) -> Iterator[None]:
    """Make this process a rank of a group of gloo inside the context. The ranks meet in a file in `folder`."""
    with mock.patch.object(distributed.distributed_c10d, "ProcessGroupGloo", OneThread):
        store = f"file://{folder}/store"
        distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=num_processes, timeout=timeout)
        try:
            yield
        finally:
            distributed.destroy_process_group()


def _failure(folder: Path, name: str) -> str:
    reports = [path.read_text() for path in sorted(folder.glob(f"{name}.*.failed"))]
    if not reports and not (folder / f"{name}.0.passed").exists():
        return "did not run: an earlier case failed"
    return "\n".join(reports)


def _run(rank: int, cases: list[Callable], num_processes: int, folder: str) -> None:
    torch.set_num_threads(1)
    for name in PRELOADED:  # before a case changes torch.float32; a forked process has them
        importlib.import_module(name)
    has_gpus = torch.cuda.is_available()
    device = torch.device("cuda", rank) if has_gpus else torch.device("cpu")
    if has_gpus:
        torch.cuda.set_device(device)
        os.environ["LOCAL_RANK"] = str(rank)  # as torchrun does; transformers and accelerate choose the GPU by it
    elif HAS_TRITON:
        from .interpreter import quicken

        quicken()
    # NVLink multicast works only on some machines.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    torch.use_deterministic_algorithms(True, warn_only=True)
    distributed.distributed_c10d.ProcessGroupGloo = OneThread
    distributed.init_process_group(
        "nccl" if has_gpus else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=num_processes,
        timeout=GPU_TIMEOUT if has_gpus else TIMEOUT,
        device_id=device if has_gpus else None,
    )
    for case in cases:
        report = Path(folder) / f"{case.__name__}.{rank}"
        try:
            case(device)
            distributed.barrier()
        except BaseException:
            report.with_suffix(f"{report.suffix}.failed").write_text(f"process {rank}:\n{traceback.format_exc()}")
            raise
        report.with_suffix(f"{report.suffix}.passed").touch()
    distributed.destroy_process_group()
