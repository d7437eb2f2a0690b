"""Multi-turn question answering with a search tool: the Gymnasium environment over its core."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from turntree.envs.core import Action
from turntree.envs.grammar import GRAMMARS, Grammar, Language, TagGrammar, Think, ToolGrammar, speaking
from turntree.envs.language import normalizer_for
from turntree.envs.limits import Limits, OnLength
from turntree.envs.loading import reject_unknown, resolve
from turntree.envs.metrics import Normalizer
from turntree.envs.prompt import PromptTemplate
from turntree.envs.rewards import Reward
from turntree.envs.schemas import example_argument
from turntree.envs.search_core import SearchQACore, SearchQAState
from turntree.envs.task import Question
from turntree.envs.tools import load_tools
from turntree.envs.truncation import Tokenizer
from turntree.envs.turn_env import TurnEnv
from turntree.errors import ConfigError, DataError
from turntree.search_backend.passage import Passage, SearchBackend

__all__ = ["Limits", "OnLength", "SearchQACore", "SearchQAEnv", "SearchQAState"]


class SearchQAEnv(TurnEnv[SearchQAState]):
    """``turntree/SearchQA-v0``: questions answered over several turns with a search tool.

    ``questions``: a list of :class:`Question`, or a path for ``load_questions``. What is searched: ``corpus`` (passages
    or a path, indexed with BM25) or ``search`` (any backend). Without questions and corpus a small fictional world is
    used. ``grammar``: an object, ``"tags"``, or an import path; ``think`` sets the default grammar's. ``prompt``: a
    :class:`PromptTemplate` or the path of its file. ``tools``: further tools by name, as objects or for ``load_tools``.
    ``reward``: see :mod:`turntree.envs.rewards`. ``language``: what the grammar speaks, ``en`` or ``zh``.
    ``normalizer``: see :mod:`turntree.envs.metrics`; by default that of the questions' language. The limits are those
    of :class:`Limits`. Unknown arguments raise ``ConfigError``.
    """

    core: SearchQACore  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self,
        questions: str | Path | Sequence[Question] | None = None,
        *,
        corpus: str | Path | Sequence[Passage] | None = None,
        search: SearchBackend | None = None,
        max_turns: int = 4,
        max_searches: int | None = None,
        top_k: int = 3,
        max_observation_tokens: int | None = None,
        tokenizer: Tokenizer | None = None,
        on_length: OnLength = "end",
        grammar: Grammar | str | None = None,
        think: Think | None = None,
        prompt: PromptTemplate | str | Path | None = None,
        tools: Mapping[str, Any] | None = None,
        reward: Reward | str = "em",
        normalizer: Normalizer | None = None,
        language: Language = "en",
        tool_retries: int = 2,
        tool_backoff_s: float = 0.5,
        render_mode: str | None = None,
        **unknown: Any,
    ) -> None:
        reject_unknown(unknown, _env_options(), what="environment option")
        limits = Limits(max_turns, max_searches, top_k, on_length, max_observation_tokens)
        chosen = speaking(_load_grammar(grammar, think), language)
        tasks, backend = _load_data(questions, corpus, search)
        core = SearchQACore(
            backend,
            limits=limits,
            grammar=chosen,
            reward=reward,
            normalizer=normalizer or normalizer_for(tasks),
            tokenizer=tokenizer,
            tools=load_tools(tools or {}),
            prompt=PromptTemplate.read(prompt) if isinstance(prompt, (str, Path)) else prompt,
        )
        super().__init__(
            core,
            tasks,
            tool_retries=tool_retries,
            tool_backoff_s=tool_backoff_s,
            action_examples=_action_examples(core.grammar),
            render_mode=render_mode,
        )

    def as_task(self, value: Any) -> Question:
        """A :class:`Question`, or its JSON form."""
        if isinstance(value, Question):
            return value
        try:
            return Question.from_json(value)
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"reset option 'task': expected a Question or its JSON form, found {value!r:.200} "
                f"({type(error).__name__}: {error})"
            ) from error


def _action_examples(grammar: Grammar) -> tuple[str, ...]:
    """Turns for random play, in the grammar's own way."""
    if not isinstance(grammar, ToolGrammar):
        return ()
    actions = [Action("search", "who wrote it"), Action("search", "《红楼梦》的作者"), Action("answer", "yes")]
    for spec in getattr(grammar, "tools", ()):
        argument = example_argument(spec)
        actions += [] if argument is None else [Action(spec.name, argument)]
    return (*(grammar.write("I need a fact.", action) for action in actions), "I am not sure what to do.")


def _env_options() -> list[str]:
    return [name for name in inspect.signature(SearchQAEnv).parameters if name != "unknown"]


def _load_grammar(grammar: Grammar | str | None, think: Think | None) -> Grammar:
    """A grammar object from its name, its import path (a class or an instance), or itself."""
    if grammar is None or grammar == "tags":
        return TagGrammar(think or "optional")
    if think is not None:
        raise ConfigError("think sets the default grammar; an own grammar decides for itself, so leave think out")
    found: Any = resolve(grammar, GRAMMARS, what="grammar") if isinstance(grammar, str) else grammar
    if isinstance(found, type):
        found = found()
    if not isinstance(found, Grammar):
        raise ConfigError(f"grammar: expected an object with the methods of Grammar, found {found!r}")
    return found


def _load_data(
    questions: str | Path | Sequence[Question] | None,
    corpus: str | Path | Sequence[Passage] | None,
    search: SearchBackend | None,
) -> tuple[Sequence[Question], SearchBackend]:
    if corpus is not None and search is not None:
        raise ConfigError("expected corpus or search, found both; a backend brings its own corpus")
    if questions is None and (corpus is not None or search is not None):
        raise ConfigError("there is something to search but there are no questions; pass questions=")
    if questions is None:
        return _default_world()
    if corpus is None and search is None:
        raise ConfigError("there are questions but nothing to search; pass corpus= or search=")
    return _load_questions(questions), search if search is not None else _load_corpus(corpus or ())


def _load_questions(questions: str | Path | Sequence[Question]) -> Sequence[Question]:
    if isinstance(questions, (str, Path)):
        from turntree.envs.datasets import load_questions

        return tuple(load_questions(questions))
    wrong = next((q for q in questions if not isinstance(q, Question)), None)
    if wrong is not None:
        raise DataError(f"questions: expected Question objects, found {wrong!r:.200}")
    return tuple(questions)


def _load_corpus(corpus: str | Path | Sequence[Passage]) -> SearchBackend:
    from turntree.search_backend.bm25 import BM25Backend

    if isinstance(corpus, (str, Path)):
        return BM25Backend.from_corpus(corpus)
    return BM25Backend.from_passages(corpus)


@functools.cache
def _default_world() -> tuple[Sequence[Question], SearchBackend]:
    from turntree.envs.worlds import generate_world

    world = generate_world("quickstart", seed=0)
    return tuple(world.questions), _load_corpus(world.passages)
