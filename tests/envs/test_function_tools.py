"""Plain typed functions as tools: schema from the signature, errors as texts, failures of the world as failures."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import TypedDict

from turntree.envs import Action, SearchQAEnv, ToolCall, ToolFailure, ToolResult
from turntree.envs.core import Effects
from turntree.envs.functions import FunctionTool, tool
from turntree.envs.schemas import example_argument, function_schema, parameters, text_parameter, violation
from turntree.envs.tools import check_tool, execute, load_tools, repeatable, tool_spec
from turntree.errors import ConfigError, ToolError


@dataclasses.dataclass
class Place:
    """Where."""

    city: str
    height: float = 0.0


class Row(TypedDict):
    """What a table holds."""

    name: str
    count: int


@tool(effects="none")
def forecast(
    place: Place,
    days: Annotated[int, "how many"] = 1,
    unit: Literal["C", "F"] = "C",
    tags: Optional[list[str]] = None,  # noqa: UP045 - as users write it
    extra: dict[str, int] | None = None,
    json: bool = False,
) -> dict[str, Any]:
    """Says how the weather will be.

    Longer words.

    Args:
        place: where to look
        unit (str): of the temperature
    """
    return {"city": place.city, "temperatures": [20 + day for day in range(days)], "unit": unit, "tags": tags}


@tool(effects="none")
def shout(text: str) -> str:
    """Repeats in capitals."""
    return text.upper()


def plain(a: int, b: int = 2) -> int:
    """Adds two numbers."""
    return a + b


def call(function: Any, argument: str, memory: Any = None) -> Any:
    (outcome,) = function.run([ToolCall("x", argument, memory)])
    return outcome


def text(function: Any, argument: str) -> str:
    outcome = call(function, argument)
    assert isinstance(outcome, ToolResult)
    return str(outcome.value)


# -- the schema --------------------------------------------------------------------------------------------------------


def test_the_schema_is_that_of_openai_and_comes_from_signature_and_docstring() -> None:
    spec = tool_spec("forecast", forecast)
    told = function_schema(spec)["function"]
    assert (told["name"], told["description"]) == ("forecast", "Says how the weather will be.")
    schema = told["parameters"]
    assert (schema["type"], schema["required"], schema["additionalProperties"]) == ("object", ["place"], False)
    properties = schema["properties"]
    assert list(properties) == ["place", "days", "unit", "tags", "extra", "json"]
    assert properties["days"] == {"default": 1, "description": "how many", "type": "integer"}
    assert properties["unit"]["enum"] == ["C", "F"]
    assert properties["unit"]["description"] == "of the temperature"
    assert {"type": "array", "items": {"type": "string"}} in properties["tags"]["anyOf"]
    assert schema["$defs"]["Place"]["required"] == ["city"]
    assert "title" not in str(schema)


def test_typed_dicts_and_a_property_called_title_keep_their_names() -> None:
    @tool(effects="none")
    def store(rows: list[Row], title: str) -> int:
        """Stores."""
        return sum(row["count"] for row in rows)

    schema = parameters(tool_spec("store", store))
    assert set(schema["properties"]) == {"rows", "title"}
    assert text(store, '{"rows": [{"name": "a", "count": 2}, {"name": "b", "count": 3}], "title": "t"}') == "5"
    assert text(store, '{"rows": [{"name": "a"}], "title": "t"}').startswith("error: rows.0.count: ")


def test_one_string_is_given_as_plain_text() -> None:
    assert text_parameter(tool_spec("shout", shout)) == "text"
    assert text_parameter(tool_spec("forecast", forecast)) is None
    assert check_tool(shout, "hé", '{"text": "x"}') == ["HÉ", '{"TEXT": "X"}']


@given(st.text(), st.integers())
def test_an_example_fits_the_schema(word: str, number: int) -> None:
    def made(a: str = word, b: int = number, *, c: float) -> str:
        """Made."""
        return f"{a}{b}{c}"

    spec = tool_spec("made", FunctionTool(made, "none"))
    argument = example_argument(spec)
    assert argument is not None
    assert violation(parameters(spec), {"a": word, "b": number, "c": 1}) == ""


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "string"}, "JSON schema of an object"),
        ({"type": "object", "properties": {"a": {"type": "strng"}}}, "expected a JSON schema"),
        ({"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1/a.json"}}}, "refers to its own parts"),
    ],
)
def test_schemas_that_are_none_or_lead_elsewhere_are_refused(schema: dict[str, Any], words: str) -> None:
    class Own(Maker):
        pass

    Own.schema = schema  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=words):
        load_tools({"x": Own()})


def test_a_function_stays_a_function() -> None:
    assert shout("a") == "A"
    assert shout.name == "shout"
    assert isinstance(shout, FunctionTool)


# -- calls -------------------------------------------------------------------------------------------------------------


def test_results_that_are_no_text_are_json() -> None:
    assert text(forecast, '{"place": {"city": "北京"}, "days": 2}') == (
        '{"city":"北京","temperatures":[20,21],"unit":"C","tags":null}'
    )

    @tool(effects="none")
    def where(city: str, height: float) -> Place:
        """Finds."""
        return Place(city, height)

    assert text(where, '{"city": "a", "height": 2}') == '{"city":"a","height":2.0}'

    @tool(effects="none")
    def nothing(n: int) -> None:
        """Does nothing."""

    assert text(nothing, '{"n": 1}') == ""

    @tool(effects="none")
    def odd(n: int) -> list[float]:
        """Is odd."""
        return [float("nan"), float("inf")]

    assert text(odd, '{"n": 1}') == '["NaN","Infinity"]'


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("{", "error: expected JSON"),
        ("[1]", "error: expected a JSON object of arguments, found [1]"),
        ('{"days": 1}', "error: place: Field required"),
        ('{"place": {"city": "a"}, "days": "many"}', "error: days: Input should be a valid integer"),
        ('{"place": {"city": "a"}, "unit": "K"}', "error: unit: Input should be 'C' or 'F'"),
        ('{"place": {"city": "a"}, "speed": 1}', "error: speed: Extra inputs are not permitted"),
        ('{"place": "a"}', "error: place: "),
    ],
)
def test_wrong_arguments_are_told_to_the_model(argument: str, words: str) -> None:
    assert text(forecast, argument).startswith(words)


def raising(error: BaseException) -> FunctionTool[Any, Any]:
    def fail(text: str) -> str:
        """Fails."""
        raise error

    return FunctionTool(fail, "none")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ZeroDivisionError("division by zero"), "error: ZeroDivisionError: division by zero"),
        (KeyError("x"), "error: KeyError: 'x'"),
        (ValueError("a\n  b"), "error: ValueError: a b"),
        (FileNotFoundError(2, "gone"), "error: FileNotFoundError: [Errno 2] gone"),
        (SystemExit(3), "error: SystemExit: 3"),
        (AssertionError(), "error: AssertionError"),
    ],
)
def test_the_functions_own_errors_are_texts(error: BaseException, told: str) -> None:
    assert text(raising(error), "x") == told


@pytest.mark.parametrize(
    "error",
    [ConnectionError("refused"), TimeoutError("slow"), ToolError("down"), OSError(28, "no space"), MemoryError()],
)
def test_failures_of_the_world_are_failures(error: Exception) -> None:
    outcome = call(raising(error), "x")
    assert isinstance(outcome, ToolFailure)
    assert outcome.kind == type(error).__name__


def test_a_result_that_json_cannot_hold_is_a_bug_of_the_tool() -> None:
    @tool(effects="none")
    def handle(text: str) -> Any:
        """Opens."""
        return object()

    with pytest.raises(TypeError, match="neither a text nor JSON"):
        call(handle, "x")


def test_a_call_ends_at_its_limit_and_is_a_failure() -> None:
    def sleep(text: str) -> str:
        """Sleeps."""
        time.sleep(float(text))
        return "awake"

    limited = FunctionTool(sleep, "none", timeout_s=0.2)
    assert call(limited, "0") == ToolResult("awake")
    assert call(limited, "1") == ToolFailure("timeout", "no result within 0.2 s")
    assert call(dataclasses.replace(limited, timeout_s=None), "0.3") == ToolResult("awake")


def test_calls_of_a_batch_run_at_the_same_time_where_allowed() -> None:
    together = threading.Barrier(3, timeout=20)

    def meet(text: str) -> str:
        """Meets the others."""
        together.wait()
        return text

    batch = [ToolCall("x", letter) for letter in "abc"]
    assert FunctionTool(meet, "none", concurrency=3).run(batch) == [ToolResult(letter) for letter in "abc"]


def test_a_failed_external_call_is_not_made_again() -> None:
    sent: list[str] = []

    def pay(text: str) -> str:
        """Pays."""
        sent.append(text)
        raise ConnectionError("lost")

    once, again = FunctionTool(pay, "external"), FunctionTool(pay, "external", idempotent=True)
    assert (repeatable(once), repeatable(again), repeatable(FunctionTool(pay, "none"))) == (False, True, True)
    for tried, times in ((once, 1), (again, 3)):
        sent.clear()
        (outcome,) = execute({"pay": tried}, [ToolCall("pay", "5")], retries=2, backoff_s=0)
        assert outcome == ToolFailure("ConnectionError", "lost")
        assert sent == ["5"] * times


def test_the_message_of_a_failure_says_how_often_it_was_tried() -> None:
    def pay(text: str) -> str:
        """Pays."""
        raise ConnectionError("lost")

    wordings: dict[Effects, str] = {"external": "failed with", "none": "failed 3 times, last with"}
    for effects, said in wordings.items():
        env = SearchQAEnv(tools={"pay": FunctionTool(pay, effects)}, tool_backoff_s=0)
        env.reset(seed=0)
        with pytest.raises(ToolError, match=rf"^a tool call \(pay\) {said} ConnectionError: lost"):
            env.step("<pay>5</pay>")


def test_a_function_that_remembers_is_given_what_it_left() -> None:
    @tool(effects="in_state")
    def note(line: str, memory: Any) -> ToolResult:
        """Notes."""
        if line == "bad":
            raise ValueError("no")
        lines = [*(memory or ()), line]
        return ToolResult(lines, memory=lines)

    assert set(parameters(tool_spec("note", note))["properties"]) == {"line"}
    assert call(note, "b", ("a",)) == ToolResult('["a","b"]', memory=["a", "b"])
    assert call(note, "bad", ("a",)) == ToolResult("error: ValueError: no", memory=("a",))
    assert check_tool(note, "x") == ['["x"]']


# -- another process ---------------------------------------------------------------------------------------------------


@pytest.fixture
def module(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """An importable module of slow, dying and remembering functions."""
    (tmp_path / "worktools.py").write_text(
        "import os\n"
        "from turntree.envs import ToolResult\n"
        "from turntree.envs.functions import tool\n"
        "def work(text: str) -> str:\n    'Says which process it is, never ends, or dies.'\n    print('noise')\n"
        "    while text == 'spin': pass\n"
        "    if text == 'die': os._exit(3)\n"
        "    return f'{os.getpid()} {1 / len(text)}'\n"
        "@tool(effects='in_state', process=True)\n"
        "def note(line: str, memory: object) -> ToolResult:\n    'Notes.'\n"
        "    lines = [*(memory or []), line]\n    return ToolResult(len(lines), memory=lines)\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "worktools", raising=False)
    return "worktools"


def loaded(module: str, name: str, **options: Any) -> Any:
    given = {"path": f"{module}:{name}", "effects": "none", "process": True, **options}
    return load_tools({"t": given})["t"]


def test_another_process_runs_the_function_and_is_killed_at_the_limit(module: str) -> None:
    work = loaded(module, "work", timeout_s=2)
    first, rest = text(work, "中").split()
    assert (first != str(os.getpid()), rest) == (True, "1.0")
    assert text(work, "ab") == f"{first} 0.5"
    assert text(work, "") == "error: ZeroDivisionError: division by zero"
    assert call(work, "spin") == ToolFailure("timeout", "no result within 2 s; its process was killed")
    assert text(work, "x").split()[0] != first
    assert call(work, "die") == ToolFailure("process", "its process ended without an answer")
    note = load_tools({"t": f"{module}:note"})["t"]
    assert call(note, "b", ("a",)) == ToolResult("2", memory=["a", "b"])


def test_a_function_that_cannot_be_imported_is_refused() -> None:
    with pytest.raises(ConfigError, match="imported by name"):
        FunctionTool(raising(ValueError()).function, "none", process=True)


# -- what is no tool, and configuration --------------------------------------------------------------------------------


def untyped(a, b: int = 1):  # type: ignore[no-untyped-def]
    """Has no types."""


def spread(*a: int) -> int:
    """Takes any."""
    return len(a)


def silent(a: int) -> int:
    return a


async def later(a: int) -> int:
    """Is async."""
    return a


def unknown(a: Nowhere) -> int:  # type: ignore[name-defined] # noqa: F821
    """Has a type that does not exist."""
    return 1


def live(a: Callable[[int], int]) -> int:
    """Takes what JSON cannot hold."""
    return a(1)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (untyped, "argument 'a' has no type"),
        (spread, "argument 'a' cannot be given by name"),
        (silent, "expected a docstring"),
        (later, "not async"),
        (unknown, "annotations cannot be read"),
        (live, "no JSON schema"),
        (Place, "no class"),
    ],
)
def test_functions_that_cannot_be_tools_are_refused_with_the_reason(function: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        FunctionTool(function, "none")


@pytest.mark.parametrize(
    ("options", "words"),
    [({"effects": "some"}, "effects"), ({"timeout_s": 0}, "timeout_s"), ({"concurrency": 0}, "concurrency"),
     ({"effects": "in_state"}, "must take memory")],
)  # fmt: skip
def test_wrong_options_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        FunctionTool(plain, **options)


def test_an_undeclared_function_counts_as_external_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert tool(plain).effects == "external"
    assert "does not say what its calls leave behind" in caplog.text
    assert "plain" in caplog.text


def test_functions_are_given_by_themselves_by_path_and_with_options() -> None:
    here = f"{__name__}:plain"
    made = load_tools(
        {
            "a": plain,
            "b": here,
            "c": {"path": here, "effects": "none", "timeout_s": 2},
            "d": f"{__name__}:shout",
            "e": {"path": f"{__name__}:shout", "timeout_s": 3},
        }
    )
    assert {name: each.effects for name, each in made.items()} == {
        "a": "external", "b": "external", "c": "none", "d": "none", "e": "none",
    }  # fmt: skip
    changed: Any = made["e"]
    assert (changed.timeout_s, changed.description) == (3, "Repeats in capitals.")
    assert text(made["c"], '{"a": 1}') == "3"
    with pytest.raises(ConfigError, match=r"tools.x=.*:untyped: .*has no type"):
        load_tools({"x": f"{__name__}:untyped"})
    with pytest.raises(ConfigError, match="are for plain functions"):
        load_tools({"x": {"path": f"{__name__}:Maker", "effects": "none"}})
    with pytest.raises(ConfigError, match="expected a class or a factory for args"):
        load_tools({"x": {"path": f"{__name__}:plain", "args": {"b": 1}}})


class Maker:
    """Makes itself."""

    effects = "none"
    description = "x"

    def run(self, calls: Any) -> Any:
        return [ToolResult("made") for _ in calls]


@pytest.mark.parametrize("grammar", ["tags", "hermes"])
def test_several_functions_in_one_environment(make_env: Callable[..., SearchQAEnv], grammar: str) -> None:
    env = make_env(grammar=grammar, tools={"add": FunctionTool(plain, "none"), "shout": shout}, max_turns=6)
    asked: Any = env.core.grammar
    env.reset(seed=0)
    assert "7" in env.step(asked.write("t", Action("add", '{"a": 5}')))[0]
    assert "HEY" in env.step(asked.write("t", Action("shout", "hey")))[0]
    observation, *_, info = env.step(asked.write("t", Action("add", '{"b": "x"}')))
    assert "required" in observation
    assert info.get("invalid_reason") == ("bad_arguments" if grammar == "hermes" else None)
    assert info["tool_calls"]["shout"] == 1


def test_a_fingerprint_changes_with_the_source() -> None:
    def make(n: int) -> Any:
        if n:

            def one(text: str) -> str:
                """Same."""
                return text
        else:

            def one(text: str) -> str:
                """Same."""
                return text + "!"

        return FunctionTool(one, "none")  # fmt: skip

    assert make(0).fingerprint != make(1).fingerprint == make(1).fingerprint
