"""C09: a call in a turn that was cut at its length limit is not executed; the second cut in a row ends the episode."""

from __future__ import annotations

from collections.abc import Sequence

from turntree.envs import Question, SearchQAEnv
from turntree.search_backend import Passage


class Counting:
    fingerprint = "counting"
    calls = 0

    def search(self, queries: Sequence[str], *, k: int) -> list[list[Passage]]:
        self.calls += len(queries)
        return [[] for _ in queries]


CUT = "<think>t</think><search>first; second; thi</search>"


def make(backend: Counting, **options: str) -> SearchQAEnv:
    env = SearchQAEnv([Question("1", "q", ("x",))], search=backend, max_turns=8, **options)  # type: ignore[arg-type]
    env.reset(seed=0)
    return env


def test_c09_one_correction_then_truncated() -> None:
    backend = Counting()
    env = make(backend, on_length="correct")
    observation, _, terminated, truncated, info = env.step(CUT, finish="length")
    assert (terminated, truncated, info["invalid_reason"]) == (False, False, "cut_at_length")
    assert "cut off" in observation
    _, _, terminated, truncated, info = env.step(CUT, finish="length")
    assert (terminated, truncated, info["stop_reason"]) == (False, True, "length")
    assert backend.calls == 0


def test_c09_a_good_turn_between_two_cuts_starts_the_count_again() -> None:
    backend = Counting()
    env = make(backend, on_length="correct")
    for _ in range(2):
        assert env.step(CUT, finish="length")[3] is False
        assert env.step(CUT)[4]["action"] == "search"
    assert backend.calls == 2


def test_c09_by_default_a_cut_ends_the_episode() -> None:
    backend = Counting()
    _, _, _, truncated, info = make(backend).step("<answer>x</answer>", finish="length")
    assert (truncated, info["stop_reason"], info["em"], backend.calls) == (True, "length", 0.0, 0)
