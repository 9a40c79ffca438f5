"""Versions of installed libraries, whatever their distribution is called. Needs nothing but Python."""

import importlib.metadata

# AMD's builds of the same modules have names of their own.
ALSO_CALLED = {
    "triton": ("triton-rocm", "pytorch-triton-rocm"),
    "transformer-engine": (
        "transformer-engine-rocm7",
        "transformer-engine-rocm10",
        "transformer-engine-rocm-torch",
    ),
}


def installed_version(library):
    """The version of an installed distribution, or None."""
    for name in (library, *ALSO_CALLED.get(library, ())):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
