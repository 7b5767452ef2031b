"""For all tests."""

import random

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def seeded() -> None:
    """A test that draws numbers draws the same ones each time, alone or after others."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
