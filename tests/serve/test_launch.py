"""What is served is decided by what a checkpoint says it is, without jax, and refused where it cannot be right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from litserve import LitAPI

import jaxml.serve
from jaxml.errors import CheckpointError, ConfigError
from jaxml.serve import launch
from jaxml.serve.classify import ClassifyAPI
from jaxml.serve.endpoints import ROUTES, EngineSpec
from jaxml.serve.private import Private
from tests.infer.written import write_classifier, write_language_model

PRIVATE = Private("nowhere")


class Own(LitAPI):
    def predict(self, x: Any) -> Any:
        return x


def test_a_manifest_says_what_is_served_and_the_step_is_settled(tmp_path: Path) -> None:
    model = launch.app(write_language_model(tmp_path / "model"), max_batch=3)
    assert model.routes == ROUTES and model.name == "small"
    assert isinstance(model.build(PRIVATE).spec, EngineSpec)
    classifier = launch.app(write_classifier(tmp_path / "classifier"), name="spam")
    lit_api = classifier.build(PRIVATE)
    assert isinstance(lit_api, ClassifyAPI) and classifier.routes == {"/v1/classify": "POST"}
    assert lit_api.path == str(tmp_path / "classifier" / "1") and lit_api.name == "spam"


def test_deciding_does_not_import_jax(tmp_path: Path) -> None:
    checkpoint = write_language_model(tmp_path)
    script = f"import sys, jaxml.serve; jaxml.serve.app({str(checkpoint)!r}); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_a_litapi_of_ones_own_is_served_at_its_path() -> None:
    served = jaxml.serve.app(Own(api_path="/v1/own"))
    assert (served.name, served.routes) == ("Own", {"/v1/own": "POST"})
    with pytest.raises(ConfigError, match="spec of Own"):
        jaxml.serve.app(Own(spec=EngineSpec(PRIVATE)))


def test_what_cannot_be_right_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        launch.app(tmp_path)
    for field in ("max_batch", "max_queue"):
        with pytest.raises(ConfigError, match=field):
            launch.app(tmp_path, **{field: 0})
    with pytest.raises(AttributeError, match="nothing"):
        _ = jaxml.serve.nothing


def test_names_that_clients_can_use() -> None:
    assert launch._checked_name("My run (2)", is_derived=True) == "My-run-2"
    for wrong in ("", "../x", "a/b", "x" * 65, "-a", "a b"):
        with pytest.raises(ConfigError):
            launch._checked_name(wrong)
