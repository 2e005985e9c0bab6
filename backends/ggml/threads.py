"""On which cores a CPU device's threads run.

ggml pins its threads itself when it gets a thread pool with a core mask. Three things it leaves to us: a
build with OpenMP does not pin a device of one thread, no build pins a thread that starts to drive a device
after the pool's first graph, and on macOS nothing can be pinned. So whoever drives a device also calls
`pin_thread`; threads that OpenMP starts from there inherit the cores.
"""

from __future__ import annotations

import ctypes as C
import functools
import os
import sys
import threading
from collections.abc import Sequence

import psutil

from backends.ggml.lib import GgmlError, ggml

MAX_CORES = 512  # GGML_MAX_N_THREADS


class ThreadpoolParams(C.Structure):
    """struct ggml_threadpool_params of ggml.h."""

    _fields_ = (
        ("cpumask", C.c_bool * MAX_CORES),
        ("n_threads", C.c_int),
        ("prio", C.c_int),
        ("poll", C.c_uint32),
        ("strict_cpu", C.c_bool),
        ("paused", C.c_bool),
    )


def threadpool_params(threads: int, cores: Sequence[int]) -> ThreadpoolParams:
    """A pool whose threads share `cores`; () means that they run wherever the system puts them.

    It starts paused: a pool that does not would pin the thread that creates it. Raises GgmlError when
    this ggml lays the structure out differently.
    """
    params = ThreadpoolParams()
    params.n_threads = -1
    ggml().threadpool_params_init(C.byref(params), threads)
    if params.n_threads != threads or any(params.cpumask) or params.strict_cpu:
        raise GgmlError("this ggml build has an unknown kind of thread pool; use ggml 0.25")
    for core in cores:
        params.cpumask[core] = True
    params.paused = True
    return params


def default_threads() -> int:
    """One thread per physical core that this process may use."""
    physical = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    return max(1, min(physical, len(allowed_cores()) or physical))


@functools.cache
def allowed_cores() -> tuple[int, ...]:
    """Numbers of the logical cores that this process may run on; () where threads cannot be pinned.

    Asked once, before any thread is pinned.
    """
    process = psutil.Process()
    if not hasattr(process, "cpu_affinity"):  # macOS
        return ()
    return tuple(core for core in sorted(process.cpu_affinity()) if core < MAX_CORES)


_thread = threading.local()


def pin_thread(cores: tuple[int, ...]) -> None:
    """Keep the calling thread on `cores`; () lets a thread that was pinned run anywhere again.

    Cheap when nothing changes, and does nothing where threads cannot be pinned.
    """
    if getattr(_thread, "cores", ()) == cores:
        return
    _set_affinity(cores or allowed_cores())
    _thread.cores = cores


def _set_affinity(cores: Sequence[int]) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    elif sys.platform == "win32":
        kernel32 = C.WinDLL("kernel32")
        kernel32.GetCurrentThread.restype = C.c_void_p
        kernel32.SetThreadAffinityMask.argtypes = (C.c_void_p, C.c_size_t)
        kernel32.SetThreadAffinityMask(kernel32.GetCurrentThread(), sum(1 << c for c in cores if c < 64))
