"""What a run folder gets drawn, with and without validation."""

from __future__ import annotations

from pathlib import Path

from turntree.trainers.report.run import write_report
from turntree.trainers.run_folder import MetricsLog, RunFolder


def test_a_run_without_validation_gets_the_curve_of_its_rollouts(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", {"seed": 0})
    with MetricsLog(run.metrics_file) as log:
        write_report(run.path)
        assert not run.curve_file.exists(), "nothing was measured yet"
        log.write(1, {"total/generated_tokens": 100.0, "tree/reward/em": 0.25})
        log.write(2, {"total/generated_tokens": 200.0, "tree/reward/em": float("nan")})  # every group was dropped
        write_report(run.path)
    assert run.curve_file.read_bytes().startswith(b"\x89PNG")
