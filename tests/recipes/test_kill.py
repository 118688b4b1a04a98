"""One real run in child processes, killed with -9 twice, equals the straight run bit for bit.

Before its first checkpoint and after one; `nox -s chaos` kills at random moments, for minutes.
"""

from __future__ import annotations

from pathlib import Path

from jaxml.checkpoint.compare import compare
from tests.chaos.kills import logged_steps, run_with_kills, start
from tests.recipes.test_resume import curve

ROOT = Path(__file__).resolve().parents[2]
FILE = """
from pathlib import Path
from tests.recipes.conftest import small_experiment
def config():
    return small_experiment(Path({directory!r}))
"""


def test_a_run_killed_twice_equals_the_straight_one(tmp_path: Path) -> None:
    file = tmp_path / "experiment.py"
    file.write_text(FILE.format(directory=str(tmp_path)))
    run_dir = tmp_path / "run"

    def beyond(step: int):
        return lambda: logged_steps(run_dir) >= step

    environment = {"PYTHONPATH": str(ROOT), "JAXML_CACHE": str(ROOT / ".cache" / "kills")}
    # In a process of its own, because this one has eight devices, which is another arithmetic.
    process = start(["train", str(file), "--run-dir", str(tmp_path / "straight")], tmp_path / "log", environment)
    assert process.wait(timeout=300) == 0, (tmp_path / "log").read_text()
    hits = run_with_kills(str(file), run_dir, [], [beyond(1), beyond(9)], environment)
    assert hits == 2
    assert curve(run_dir) == curve(tmp_path / "straight")
    difference = compare(tmp_path / "straight", run_dir)
    assert difference.is_same, difference
