# SPDX-License-Identifier: Apache-2.0
"""A card that runs nothing: Triton compiles for Hopper and launches through its own driver, and no kernel runs.

It measures the host's part of a launch without a GPU. The stand-in for CUDA's driver library is compiled here, from C.
Each of its functions returns success at once, so a launch lacks only the time of CUDA's own driver.
"""

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from vllm_sparse_kernels.cards import CARDS

HOPPER = GPUTarget("cuda", 90, 32)
LIBRARY = "libcuda.so.1"
LIBRARY_SOURCE = """
typedef unsigned long long u64;
#define NOTHING(name) int name(void) { return 0; }
#define HANDLE(name) int name(void **handle) { *handle = (void *)1; return 0; }
#define NUMBER(name, value) int name(int *number) { *number = value; return 0; }

NOTHING(cuInit) NOTHING(cuCtxSetCurrent) NOTHING(cuCtxSetLimit) NOTHING(cuCtxGetLimit) NOTHING(cuModuleUnload)
NOTHING(cuFuncSetAttribute) NOTHING(cuFuncSetCacheConfig) NOTHING(cuLaunchKernelEx) NOTHING(cuStreamIsCapturing)
NOTHING(cuTensorMapEncodeTiled) NOTHING(cuTensorMapEncodeIm2col) NOTHING(cuOccupancyMaxActiveClusters)
HANDLE(cuCtxGetCurrent) HANDLE(cuDevicePrimaryCtxRetain) HANDLE(cuModuleLoadData) HANDLE(cuModuleGetFunction)
NUMBER(cuDeviceGet, 0) NUMBER(cuCtxGetDevice, 0) NUMBER(cuDeviceGetCount, 1) NUMBER(cuDriverGetVersion, 13000)
NUMBER(cuDeviceGetAttribute, SHARED_BYTES) NUMBER(cuFuncGetAttribute, 1024)

int cuGetErrorString(int error, const char **text) { *text = "no error"; return 0; }
int cuPointerGetAttribute(u64 *value, int attribute, u64 pointer) { *value = pointer; return 0; }
"""


def load_null_library(folder: Path) -> None:
    """Compile the stand-in for CUDA's driver library in ``folder``, and load it into this process."""
    source, library = folder / "cuda.c", folder / LIBRARY
    source.write_text(LIBRARY_SOURCE)
    flags = [
        f"-DSHARED_BYTES={next(card.shared_bytes for card in CARDS if card.target == HOPPER.arch)}",
        f"-Wl,-soname,{LIBRARY}",
    ]
    try:
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", *flags, "-o", library, source], check=True)
    except FileNotFoundError as error:
        raise RuntimeError("given no C compiler, expected `cc` on PATH; install gcc or clang") from error
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


class NullDriver:
    """Triton's CUDA driver on a card that runs nothing.

    ``utils`` are Triton's functions in C, which load and launch kernels."""

    def __init__(self) -> None:
        from triton.backends.nvidia.driver import CudaLauncher, CudaUtils

        self.utils = CudaUtils()
        self.launcher_cls = CudaLauncher

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def null_card() -> Iterator[None]:
    """Launch kernels on a card that runs nothing, within the context."""
    with tempfile.TemporaryDirectory() as folder:
        load_null_library(Path(folder))
        before = driver._active
        driver.set_active(NullDriver())
        try:
            yield
        finally:
            driver._active = before
