"""`jaxml prove` as a command: one JSON object, and a failure is an exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

# The last held-out batch is dropped, in the process of the command.
FAULTY = """
import sys
from jaxml.data.batches import EvalBatches
EvalBatches.__len__ = lambda self: int(self._ends[-1]) // self.batch_size
from jaxml.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
EXPERIMENT = """
from pathlib import Path
from tests.prove.conftest import packed_experiment

def config():
    return packed_experiment(Path(__file__).parent)
"""


def test_a_claim_that_fails_is_told_as_json_and_by_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "experiment.py").write_text(EXPERIMENT)
    options = ["--only", "evaluated", "--no-float32", "--json", "--out", str(tmp_path / "proof")]
    command = [sys.executable, "-c", FAULTY, "prove", str(tmp_path / "experiment.py"), *options, "--train.seed", "5"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAXML_CACHE": str(tmp_path / "cache")}
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=120)
    assert ended.returncode == 1, ended.stderr[-2000:]
    found = json.loads(ended.stdout)
    assert found["verdict"] == "fail"
    claims = {claim["name"].rpartition(": ")[2]: claim for claim in found["claims"]}
    assert claims["record ids"]["verdict"] == "fail"
    assert claims["record ids"]["error"] > claims["record ids"]["bound"] == 0
    assert Path(found["page"]).read_text().count('class="fail"') >= 1
    assert "counted 0 times" in ended.stderr
