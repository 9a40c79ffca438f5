"""An invented machine: every Python process of the tests sees this CPU and host name,
and neither a GPU's driver nor a power meter.

tests/conftest.py puts this directory on PYTHONPATH, and gives the processes an empty home. A test that
knows the machine it was written on then fails on that machine too.
"""

import io
import pathlib
import platform

CPU, SETS = "Invented CPU 9000", "avx2 avx512_bf16"
HOST = "invented-host"
ABSENT = {"/dev/nvidiactl", "/dev/kfd", "/usr/lib/wsl/lib/libnvidia-ml.so.1", "/sys/class/powercap"}

_open, _exists, _glob = pathlib.Path.open, pathlib.Path.exists, pathlib.Path.glob


def _invented(self, *args, **kwargs):
    if str(self) == "/proc/cpuinfo":
        return io.StringIO(f"processor\t: 0\nmodel name\t: {CPU}\nflags\t\t: fpu {SETS}\n")
    return _open(self, *args, **kwargs)


def _is_there(self, *args, **kwargs):
    return str(self) not in ABSENT and _exists(self, *args, **kwargs)


def _found(self, *args, **kwargs):
    return iter(()) if str(self) in ABSENT else _glob(self, *args, **kwargs)


pathlib.Path.open = _invented
pathlib.Path.exists = _is_there
pathlib.Path.glob = _found
platform.node = lambda: HOST
