"""The command line as a user types it, on the small experiment: verbs, --json, overrides, refusals, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxml.cli.experiment_file import load_experiment
from jaxml.cli.main import VERBS, finite, main
from tests.recipes.conftest import StraightRun, share_programs, straight  # noqa: F401

FILE = """
from pathlib import Path
from tests.recipes.conftest import small_experiment
def config():
    return small_experiment(Path({directory!r}))
"""


@pytest.fixture(autouse=True)
def _share_programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    share_programs(monkeypatch)
    # Compiled programs belong to the suite's cache, not to the user's.
    monkeypatch.setattr("jaxml.recipes.train.use_compilation_cache", lambda directory: None)


@pytest.fixture
def file(straight: StraightRun, tmp_path: Path) -> str:  # noqa: F811
    """An experiment file that has the straight run's data."""
    path = tmp_path / "experiment.py"
    path.write_text(FILE.format(directory=str(straight.run_dir.parent)))
    return str(path)


def last_json(capsys: pytest.CaptureFixture[str]) -> dict:
    out = capsys.readouterr().out.strip().splitlines()
    assert len(out) == 1, "with --json, stdout is one object"
    return json.loads(out[0])


def test_train_and_resume_print_one_final_object(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = str(tmp_path / "run")
    assert main(["train", file, "--run-dir", run_dir, "--train.steps", "8", "--checkpoint.every", "4", "--json"]) == 0
    result = last_json(capsys)
    assert (result["step"], result["status"]) == (8, "finished")
    assert result["eval_loss"] > 0
    assert main(["resume", run_dir, "--train.steps", "9", "--json"]) == 0
    assert last_json(capsys)["step"] == 9


def test_inspect_seen_and_data_show_read_a_run(
    straight: StraightRun,  # noqa: F811
    file: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_dir = straight.run_dir
    assert main(["inspect", str(run_dir), "--json"]) == 0
    described = last_json(capsys)
    assert described["step"] == 24
    assert described["manifest"]["metrics"]["eval_loss"] == straight.result.metrics["eval_loss"]
    assert main(["inspect", str(run_dir / "checkpoints" / "20"), str(run_dir)]) == 1
    assert "params.embed.table" in capsys.readouterr().out
    assert main(["data", "show", file, "--rows", "2", "--json"]) == 0
    rows = last_json(capsys)["rows"]
    assert len(rows) == 2
    number = rows[0]["segments"][0]["document"]["number"]
    assert main(["seen", str(run_dir), "--document", str(number), "--json"]) == 0
    seen = last_json(capsys)["documents"][0]
    assert seen["steps"][0] == 1
    assert seen["checkpoints"] == [16, 20, 24]
    assert main(["data", "prepare", file, "--json"]) == 0
    assert last_json(capsys)["train_rows"] > 0


def test_errors_have_exit_codes_and_four_parts_in_json(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(tmp_path / "none.py"), "--json"]) == 2
    fault = last_json(capsys)["faults"][0]
    assert set(fault) == {"failed", "expected", "got", "todo"}
    assert main(["trian", "x"]) == 2
    assert "did you mean 'train'?" in capsys.readouterr().err
    assert main(["train", file, "--start", "initialise-from"]) == 2
    assert main(["resume", str(tmp_path / "none")]) == 1


def test_a_misspelt_key_is_refused_with_a_suggestion(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["train", file, "--optimizer.learnig-rate", "1e-3"])
    assert left.value.code == 2
    captured = capsys.readouterr()
    assert "--optimizer.learning-rate" in captured.out + captured.err


def test_json_is_one_object_also_when_the_command_was_wrong(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["resume", "--json"])
    assert last_json(capsys)["error"] == "usage"
    broken = tmp_path / "broken.py"
    broken.write_text("def config():\n    return 1 / 0\n")
    assert main(["train", str(broken), "--json"]) == 2
    assert "ZeroDivisionError" in last_json(capsys)["faults"][0]["got"]
    assert main(["train", str(Path(__file__).parents[2] / "README.md"), "--json"]) == 2
    assert last_json(capsys)["error"] == "ConfigError"
    assert finite({"a": [float("nan"), 1.0], "b": float("inf")}) == {"a": [None, 1.0], "b": None}


def test_modules_beside_an_experiment_can_be_imported(straight: StraightRun, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "beside_it.py").write_text("STEPS = 7\n")
    text = FILE.format(directory=str(straight.run_dir.parent)).replace(
        "def config", "from beside_it import STEPS\ndef config"
    )
    (tmp_path / "experiment.py").write_text(text)
    load_experiment(str(tmp_path / "experiment.py"), [])


def test_every_verb_has_help_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    overview = capsys.readouterr().out
    for verb, (_, _, example) in VERBS.items():
        assert example in overview
        if verb in ("data", "keys"):
            assert main([verb, "--help"]) == 0
        else:
            with pytest.raises(SystemExit) as left:
                main([verb, "--help"])
            assert left.value.code == 0
        assert "example:" in capsys.readouterr().out


def test_help_imports_nothing_heavy() -> None:
    code = "import sys; from jaxml.cli.main import main; main(['--help']); print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for heavy in ("'jax'", "'numpy'", "'tyro'", "'rich'", "'flax'"):
        assert heavy not in done.stdout
