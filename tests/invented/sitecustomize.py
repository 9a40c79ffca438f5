"""An invented machine: every Python process of the tests sees this CPU and this host name.

tests/conftest.py puts this directory on PYTHONPATH, and gives the processes an empty home. A test that
knows the machine it was written on then fails on that machine too.
"""

import io
import pathlib
import platform

CPU = "Invented CPU 9000"
HOST = "invented-host"

_open = pathlib.Path.open


def _invented(self, *args, **kwargs):
    if str(self) == "/proc/cpuinfo":
        return io.StringIO(f"processor\t: 0\nmodel name\t: {CPU}\n")
    return _open(self, *args, **kwargs)


pathlib.Path.open = _invented
platform.node = lambda: HOST
