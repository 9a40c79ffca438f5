"""For all tests."""

import gc

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """tests/benchmarks measures on request only; its plugin is not in every image."""
    if hasattr(config.option, "benchmark_disable") and not config.option.benchmark_enable:
        config.option.benchmark_disable = True


@pytest.fixture(autouse=True, scope="module")
def few_objects_to_collect():
    """A run collects garbage before it measures, which takes longest for what pytest and imports hold."""
    gc.collect()
    gc.freeze()
