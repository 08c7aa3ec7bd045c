"""One process for the tests of whole jobs that runs the command over and over."""

from __future__ import annotations

import pytest
from command import ENV
from nursery import Nursery


@pytest.fixture(scope="session")
def nursery():
    made = Nursery({**ENV, "TRANSFORMERS_VERBOSITY": "error"})
    yield made
    made.close()
