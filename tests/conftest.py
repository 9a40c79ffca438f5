"""For all tests."""

import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def few_objects_to_collect():
    """A run collects garbage before it measures, which takes longest for what pytest and imports hold."""
    gc.collect()
    gc.freeze()
