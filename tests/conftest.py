"""For all tests."""

import gc

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """tests/benchmarks measures on request only; its plugin is not in every image."""
    if hasattr(config.option, "benchmark_disable") and not config.option.benchmark_enable:
        config.option.benchmark_disable = True


def pytest_collection_modifyitems(items):
    """The slowest files first, so that no worker is left alone with one at the end."""
    longest = ("launch", "distributed", "combinations", "train", "sweep", "profile", "containers")
    ranks = {f"test_{name}.py": i for i, name in enumerate(longest)}
    items.sort(key=lambda item: ranks.get(item.path.name, len(ranks)))


def pytest_terminal_summary(terminalreporter):
    """Prints the figures of passed tests too: record_property("figure", ...)."""
    passed = terminalreporter.stats.get("passed", [])
    figures = [text for test in passed for key, text in test.user_properties if key == "figure"]
    if figures:
        terminalreporter.section("figures")
        for text in sorted(figures):
            terminalreporter.line(text)


@pytest.fixture(autouse=True, scope="module")
def few_objects_to_collect():
    """A run collects garbage before it measures: objects of pytest and imports would slow that."""
    gc.collect()
    gc.freeze()
