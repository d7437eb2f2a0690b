"""F13: what a server is asked for in an evaluation, and what the result records, is the evaluation's own sampling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from turntree.commands import run_evaluate


def test_f13_evaluation_is_sampled_as_configured(bed: Any, openai_server: Any, tmp_path: Path) -> None:
    openai_server.faults(*[{"kind": "say", "text": "<answer> yes </answer>"}] * 24)
    run_evaluate(
        [
            *(*bed.args, "engine=openai", f"engine.base_url={openai_server.url}", "engine.model=tiny"),
            *("env.grammar=turntree.envs.worlds.grammar:WorldGrammar", f"env.test_questions={bed.world}"),
            *("algorithm.chains=8", "sampling.temperature=1.3", "sampling.eval_temperature=0.0"),
            f"out={tmp_path}",
        ]
    )
    bodies = [request["body"] for request in openai_server.log()]
    assert len(bodies) == 24, "one sample a question, whatever the group size of training"
    assert {(body["temperature"], body.get("n", 1)) for body in bodies} == {(0.0, 1)}
    saved = json.loads((tmp_path / "evaluation.json").read_text(encoding="utf-8"))
    assert saved["sampling"]["temperature"] == 0.0
