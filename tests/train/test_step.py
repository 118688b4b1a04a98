"""The laws of `jaxml.train.step`: one update is one function, however the batch is split and wherever it runs."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest
from conftest_train import CLASSIFICATION, OPTIMIZER, ROWS, classification_batch, host, language_batch

