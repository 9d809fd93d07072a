"""Run as a program of its own: ask the CUDA driver what is there and print it as JSON.

The rule kept here: standard library only, and no import of portattn, so that a broken driver or
framework can hurt this child process alone.
"""

import ctypes
import json
import sys
from typing import Any

_ATTRIBUTES = {"shared_memory": 97, "multiprocessors": 16, "major": 75, "minor": 76}
_NO_DEVICE = 100


def probe() -> dict[str, Any]:
    """What the driver says, as a dictionary; never raises for a machine without CUDA."""
    found: dict[str, Any] = {"driver": None, "devices": [], "code": "", "problem": ""}
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        cuda = ctypes.CDLL(name)
    except OSError as error:
        found.update(code="driver_missing", problem=f"{name} cannot be loaded ({error})"[:200])
        return found
    try:
        version = ctypes.c_int()
        if cuda.cuDriverGetVersion(ctypes.byref(version)) == 0:
            found["driver"] = f"{version.value // 1000}.{version.value % 1000 // 10}"
        status = cuda.cuInit(0)
        count = ctypes.c_int()
        if status == 0:
            status = cuda.cuDeviceGetCount(ctypes.byref(count))
        if status == _NO_DEVICE or (status == 0 and count.value == 0):
            found.update(code="no_device", problem="the driver sees no device")
            return found
        if status:
            found.update(code="driver_error", problem=f"cuInit returned CUDA error {status}")
            return found
        for index in range(count.value):
            found["devices"].append(_device(cuda, index))
    except AttributeError as error:  # a stub library without these symbols
        found.update(code="driver_error", problem=f"{name} is not a CUDA driver ({error})"[:200])
    return found


def _device(cuda: ctypes.CDLL, index: int) -> dict[str, Any]:
    handle, name, memory = ctypes.c_int(), ctypes.create_string_buffer(128), ctypes.c_size_t()
    cuda.cuDeviceGet(ctypes.byref(handle), index)
    cuda.cuDeviceGetName(name, 128, handle)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), handle)
    values = {}
    for key, number in _ATTRIBUTES.items():
        value = ctypes.c_int()
        cuda.cuDeviceGetAttribute(ctypes.byref(value), number, handle)
        values[key] = value.value
    return {
        "index": index,
        "name": name.value.decode(errors="replace"),
        "capability": [values.pop("major"), values.pop("minor")],
        "memory": memory.value,
        **values,
    }


if __name__ == "__main__":
    print(json.dumps(probe()))
