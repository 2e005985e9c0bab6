"""A typed ctypes binding of the part of ggml that hetero uses.

Pointers are plain integers. Signatures follow ggml.h, ggml-alloc.h, ggml-backend.h and ggml-cpu.h of
ggml 0.25. The layout of `struct ggml_tensor` is asserted when the library is loaded, since
custom operators read it directly.
"""

from __future__ import annotations

import ctypes as C
import functools
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

P, I32, I64, F32 = C.c_void_p, C.c_int, C.c_int64, C.c_float
SIZE, BOOL, STR = C.c_size_t, C.c_bool, C.c_char_p

# ggml_type ids that the graphs name themselves; quant.types has them all
TYPE_F32, TYPE_F16, TYPE_Q8_0, TYPE_I32, TYPE_I64 = 0, 1, 8, 26, 27

# struct ggml_tensor in 8-byte words (4-byte `type` is padded to the first one)
WORD_BUFFER, WORD_NE, WORD_NB, WORD_SRC, WORD_VIEW_OFFSET, WORD_DATA = 1, 2, 6, 19, 30, 31
TENSOR_WORDS = 42

# ggml's CPU code for the levels of backends/cpu/features.py below the best, best first
OLDER_VARIANTS = {"avx2": ("haswell",), "avx_vnni": ("alderlake", "haswell")}

STATUS_SUCCESS = 0
LOG_WARN, LOG_ERROR = 3, 4
BUFFER_USAGE_WEIGHTS, BUFFER_USAGE_COMPUTE = 1, 2
DEVICE_KINDS = {0: "cpu", 1: "gpu", 2: "igpu", 3: "accel", 4: "meta"}


# How often a GNU OpenMP thread looks before it sleeps at a barrier; a graph has hundreds of barriers.
# The default (300,000) burns a time slice at each of them when another program has taken a core: a step
# of 3 ms took 240 ms at 30,000. Sleeping too early costs more than it saves where threads take turns with
# clients on the same cores: 1,000 gave 13-20 % more tokens per second than 300 under tests/bench/compare.py,
# and a step beside one busy neighbour is 12 ms instead of 7.
SPIN_COUNT = "1000"


class GgmlError(RuntimeError):
    """ggml is missing, of an unknown layout, or a device refused an allocation."""


class DeviceError(ValueError):
    """A device that does not exist or cannot be opened; the message is one line for the user."""


class InitParams(C.Structure):
    _fields_ = (("mem_size", SIZE), ("mem_buffer", P), ("no_alloc", BOOL))


class DeviceCaps(C.Structure):
    _fields_ = tuple((n, BOOL) for n in ("asynchronous", "host_buffer", "from_host_ptr", "events", "mmap"))


class DeviceProps(C.Structure):
    _fields_ = (
        ("name", STR),
        ("description", STR),
        ("memory_free", SIZE),
        ("memory_total", SIZE),
        ("type", I32),
        ("device_id", STR),
        ("caps", DeviceCaps),
    )


class TypeTraits(C.Structure):
    _fields_ = (
        ("type_name", STR),
        ("blck_size", I64),
        ("blck_size_interleave", I64),
        ("type_size", SIZE),
        ("is_quantized", BOOL),
        ("to_float", C.CFUNCTYPE(None, C.c_void_p, C.c_void_p, C.c_int64)),  # from, to, how many
    )


# name: (library, result, arguments); names without their ggml_ prefix
SIGNATURES: dict[str, tuple] = {
    "init": ("base", P, InitParams),
    "free": ("base", None, P),
    "tensor_overhead": ("base", SIZE),
    "graph_overhead_custom": ("base", SIZE, SIZE, BOOL),
    "new_tensor_4d": ("base", P, P, I32, I64, I64, I64, I64),
    "get_data": ("base", P, P),
    "nbytes": ("base", SIZE, P),
    "get_type_traits": ("base", C.POINTER(TypeTraits), I32),
    "set_name": ("base", P, P, STR),
    "set_input": ("base", None, P),
    "set_output": ("base", None, P),
    "mul_mat": ("base", P, P, P, P),
    "mul_mat_id": ("base", P, P, P, P, P),
    "mul": ("base", P, P, P, P),
    "add": ("base", P, P, P, P),
    "add_id": ("base", P, P, P, P, P),
    "div": ("base", P, P, P, P),
    "clamp": ("base", P, P, P, F32, F32),
    "sum_rows": ("base", P, P, P),
    "soft_max": ("base", P, P, P),
    "sigmoid": ("base", P, P, P),
    "fill": ("base", P, P, P, F32),
    "argsort_top_k": ("base", P, P, P, I32),
    "scale": ("base", P, P, P, F32),
    "norm": ("base", P, P, P, F32),
    "rms_norm": ("base", P, P, P, F32),
    "tanh": ("base", P, P, P),
    "silu": ("base", P, P, P),
    "softplus": ("base", P, P, P),
    "ssm_conv": ("base", P, P, P, P),
    "gated_delta_net": ("base", P, P, P, P, P, P, P, P, I64),
    "gelu": ("base", P, P, P),
    "swiglu": ("base", P, P, P),
    "geglu": ("base", P, P, P),
    "get_rows": ("base", P, P, P, P),
    "swiglu_split": ("base", P, P, P, P),
    "geglu_split": ("base", P, P, P, P),
    "swiglu_oai": ("base", P, P, P, P, F32, F32),
    "reshape_2d": ("base", P, P, P, I64, I64),
    "reshape_3d": ("base", P, P, P, I64, I64, I64),
    "reshape_4d": ("base", P, P, P, I64, I64, I64, I64),
    "view_4d": ("base", P, P, P, I64, I64, I64, I64, SIZE, SIZE, SIZE, SIZE),
    "backend_view_init": ("base", I32, P),
    "permute": ("base", P, P, P, I32, I32, I32, I32),
    "cont": ("base", P, P, P),
    "cast": ("base", P, P, P, I32),
    "concat": ("base", P, P, P, P, I32),
    "set_rows": ("base", P, P, P, P, P),
    "soft_max_ext": ("base", P, P, P, P, F32, F32),
    "soft_max_add_sinks": ("base", None, P, P),
    "flash_attn_ext": ("base", P, P, P, P, P, P, F32, F32, F32),
    "flash_attn_ext_set_prec": ("base", None, P, I32),
    "flash_attn_ext_add_sinks": ("base", None, P, P),
    "rope_ext": ("base", P, P, P, P, P, I32, I32, I32, F32, F32, F32, F32, F32, F32),
    "custom_4d": ("base", P, P, I32, I64, I64, I64, I64, C.POINTER(P), I32, P, I32, P),
    "new_graph_custom": ("base", P, P, SIZE, BOOL),
    "build_forward_expand": ("base", None, P, P),
    "op_desc": ("base", STR, P),
    "graph_n_nodes": ("base", I32, P),
    "graph_node": ("base", P, P, I32),
    "graph_add_node": ("base", None, P, P),
    "gallocr_new": ("base", P, P),
    "gallocr_free": ("base", None, P),
    "gallocr_alloc_graph": ("base", BOOL, P, P),
    "gallocr_get_buffer_size": ("base", SIZE, P, I32),
    "backend_free": ("base", None, P),
    "backend_graph_compute": ("base", I32, P, P),
    "backend_graph_compute_async": ("base", I32, P, P),
    "backend_synchronize": ("base", None, P),
    "backend_tensor_set_async": ("base", None, P, P, P, SIZE, SIZE),
    "backend_tensor_get_async": ("base", None, P, P, P, SIZE, SIZE),
    "backend_tensor_set_2d_async": ("base", None, P, P, P, SIZE, SIZE, SIZE, SIZE, SIZE),
    "backend_tensor_get_2d_async": ("base", None, P, P, P, SIZE, SIZE, SIZE, SIZE, SIZE),
    "backend_tensor_copy": ("base", None, P, P),
    "backend_tensor_set": ("base", None, P, P, SIZE, SIZE),
    "backend_tensor_get": ("base", None, P, P, SIZE, SIZE),
    "backend_tensor_alloc": ("base", I32, P, P, P),
    "backend_alloc_ctx_tensors_from_buft": ("base", P, P, P),
    "backend_buffer_free": ("base", None, P),
    "backend_buffer_clear": ("base", None, P, C.c_uint8),
    "backend_buffer_get_base": ("base", P, P),
    "backend_buffer_get_size": ("base", SIZE, P),
    "backend_buffer_set_usage": ("base", None, P, I32),
    "backend_buft_name": ("base", STR, P),
    "backend_buft_alloc_buffer": ("base", P, P, SIZE),
    "backend_dev_get_props": ("base", None, P, C.POINTER(DeviceProps)),
    "backend_dev_init": ("base", P, P, STR),
    "backend_dev_buffer_type": ("base", P, P),
    "backend_dev_host_buffer_type": ("base", P, P),
    "backend_dev_buffer_from_host_ptr": ("base", P, P, P, SIZE, SIZE),
    "backend_dev_supports_op": ("base", BOOL, P, P),
    "backend_dev_backend_reg": ("base", P, P),
    "backend_reg_name": ("base", STR, P),
    "backend_reg_dev_count": ("base", SIZE, P),
    "backend_reg_dev_get": ("base", P, P, SIZE),
    "backend_reg_get_proc_address": ("base", P, P, STR),
    "backend_reg_count": ("registry", SIZE),
    "backend_reg_get": ("registry", P, SIZE),
    "backend_dev_count": ("registry", SIZE),
    "backend_dev_get": ("registry", P, SIZE),
    "backend_load": ("registry", P, STR),
    "backend_load_all_from_path": ("registry", None, STR),
    "threadpool_params_init": ("base", None, P, I32),
    "log_set": ("base", None, P, P),
    "set_abort_callback": ("base", P, P),
    "quantize_chunk": ("base", SIZE, I32, P, P, I64, I64, I64, P),
    "version": ("base", STR),
}


class Library:
    """The loaded ggml. `lib.mul_mat(ctx, a, b)` calls `ggml_mul_mat`; see SIGNATURES."""

    def __init__(self, folder: Path):
        self.folder = folder
        if "OMP_WAIT_POLICY" not in os.environ:  # read once, when OpenMP's library is loaded
            os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
        handles = {"base": _open(folder, "ggml-base")}
        cpu = _find(folder, "ggml-cpu")
        if cpu is not None:  # libggml of such a build may link its CPU backend
            handles["cpu"] = _open(folder, "ggml-cpu")
        handles["registry"] = _open(folder, "ggml")
        for name, (where, result, *arguments) in SIGNATURES.items():
            function = getattr(handles[where], f"ggml_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        self._load_backends()
        self._assert_tensor_layout()

    def _load_backends(self) -> None:
        """In a build whose backends are separate libraries, load those that run here, the best CPU one.

        Beside an executable (build/) may lie more: in the folder hetero-backends.
        """

        @C.CFUNCTYPE(None, I32, STR, P)
        def complain(level: int, text: bytes, _: int) -> None:
            if level in (LOG_WARN, LOG_ERROR):
                sys.stderr.write(text.decode(errors="replace"))

        self.log_set(C.cast(complain, P), None)  # which library was loaded from where is no news
        if not self.backend_dev_count():
            older = _variants_of_level(self.folder)
            if older:
                for path in [*_backends(self.folder), *older[:1]]:
                    self.backend_load(os.fsencode(path))
            else:
                self.backend_load_all_from_path(os.fsencode(self.folder))
        for path in _backends(beside_executable()):
            self.backend_load(os.fsencode(path))
        self.log_set(None, None)

    def __getattr__(self, name: str):  # only reached for a name that SIGNATURES lacks
        raise AttributeError(f"ggml_{name} is not in the binding's table")

    def context(self, num_tensors: int, graph_nodes: int = 0) -> int:
        """A ggml context that holds metadata only; free it with `lib.free`."""
        size = self.tensor_overhead() * num_tensors
        if graph_nodes:
            size += self.graph_overhead_custom(graph_nodes, False)
        return self.init(InitParams(size, None, True))

    def _assert_tensor_layout(self) -> None:
        ctx = self.init(InitParams(1 << 16, None, False))
        try:
            source = self.new_tensor_4d(ctx, TYPE_F32, 3, 5, 7, 1)
            arguments = (P * 1)(source)
            tensor = self.custom_4d(ctx, TYPE_F32, 2, 1, 1, 1, arguments, 1, 1, 1, None)
            want = {WORD_NE: 3, WORD_NE + 1: 5, WORD_NE + 2: 7, WORD_NB: 4, WORD_NB + 1: 12}
            found = {word: word_of(source, word) for word in want}
            same = found == want and word_of(source, WORD_DATA) == self.get_data(source)
            if not (same and word_of(tensor, WORD_SRC) == source):
                raise GgmlError(f"{self.folder}: this ggml build lays out tensors differently; use ggml 0.25")
        finally:
            self.free(ctx)


def word_of(tensor: int, word: int) -> int:
    """The 8-byte word `word` of a `struct ggml_tensor`."""
    return C.c_int64.from_address(tensor + 8 * word).value


def set_buffer(tensor: int, buffer: int | None) -> None:
    """Pretend that a tensor lies in a buffer, to ask whether an operator would support it."""
    C.c_void_p.from_address(tensor + 8 * WORD_BUFFER).value = buffer


def shape_of(tensor: int) -> tuple[int, ...]:
    """ne[0..3], row length first."""
    return tuple(word_of(tensor, WORD_NE + i) for i in range(4))


def procedure(registry: int, name: str, result: Any, *arguments: Any) -> Any:
    """A function that only some backends have, asked of a backend's registry; None if it lacks it."""
    address = ggml().backend_reg_get_proc_address(registry, name.encode())
    return C.CFUNCTYPE(result, *arguments)(address) if address else None


@functools.cache
def ggml() -> Library:
    """The process's ggml: HETERO_GGML_LIBS if set, else the one inside llama-cpp-python.

    Raises GgmlError when there is none.
    """
    return Library(library_folder())


def library_folder() -> Path:
    """The folder whose ggml libraries are used; raises GgmlError when there is none."""
    chosen = os.environ.get("HETERO_GGML_LIBS")
    if chosen:
        folder = Path(chosen)
        if _find(folder, "ggml-base") is None:
            raise GgmlError(f"HETERO_GGML_LIBS: no ggml-base library in {chosen}")
        return folder
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        raise GgmlError("ggml not found: pip install llama-cpp-python, or set HETERO_GGML_LIBS")
    return Path(spec.origin).parent / "lib"


def cpu_variants(folder: Path) -> list[str]:
    """The CPUs that a build has code for, where it is in libraries of its own: haswell, zen4, …"""
    return [path.name.split("ggml-cpu-")[1].split(".")[0] for path in _libraries(folder, "ggml-cpu-")]


def beside_executable() -> Path | None:
    """Where further backends of ggml may lie: hetero-backends, beside the executable."""
    file = os.environ.get("HETERO_EXECUTABLE") or sys.executable
    return Path(file).parent / "hetero-backends" if getattr(sys, "frozen", False) else None


def _variants_of_level(folder: Path) -> list[Path]:
    """CPU code for the lower level that HETERO_CPU_LEVEL names, best first; [] to take the best there is."""
    names = OLDER_VARIANTS.get(os.environ.get("HETERO_CPU_LEVEL", ""), ())
    return [path for name in names for path in _libraries(folder, f"ggml-cpu-{name}")]


def _backends(folder: Path | None) -> list[Path]:
    """Libraries of backends other than the CPU's."""
    paths = _libraries(folder, "ggml-") if folder else []
    return [path for path in paths if not any(part in path.name for part in ("ggml-base", "ggml-cpu"))]


def _libraries(folder: Path, stem: str) -> list[Path]:
    prefix, suffix = _naming()
    return sorted(folder.glob(f"{prefix}{stem}*{suffix}"))


def _naming() -> tuple[str, str]:
    return {"win32": ("", ".dll"), "darwin": ("lib", ".dylib")}.get(sys.platform, ("lib", ".so"))


def _find(folder: Path, stem: str) -> Path | None:
    prefix, suffix = _naming()
    names = [f"{prefix}{stem}{suffix}"]
    if stem == "ggml":  # some builds name the registry after what they link
        names += [p.name for p in sorted(folder.glob(f"{prefix}ggml.*{suffix}"))]
    return next((folder / n for n in names if (folder / n).is_file()), None)


def _open(folder: Path, stem: str) -> C.CDLL:
    path = _find(folder, stem)
    if path is None:
        raise GgmlError(f"no {stem} library in {folder}")
    try:
        # backends resolve ggml-base's symbols through the global table
        return C.CDLL(str(path), mode=getattr(C, "RTLD_GLOBAL", 0))
    except OSError as error:
        raise GgmlError(f"cannot load {path.name}: {error}") from None
