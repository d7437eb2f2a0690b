"""Arguments of tools as JSON: the schema of a tool, an example of a call, and what is wrong with one.

An action's argument is a text. A tool whose schema knows one required string and nothing else is given that string as
it is, so that it reads well in any grammar (:func:`text_parameter`); every other one is given a JSON object.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import Any

from turntree.envs.core import ToolSpec
from turntree.envs.task import FrozenDict, freeze, thaw
from turntree.errors import ConfigError

__all__ = [
    "check_schema",
    "decode_arguments",
    "encode_arguments",
    "example_argument",
    "function_schema",
    "parameters",
    "parse_json",
    "text_parameter",
    "text_schema",
    "violation",
]

_SURROGATE = re.compile("[\ud800-\udfff]")


def text_schema(name: str = "input", description: str = "") -> FrozenDict:
    """The schema of one required string."""
    told = {"type": "string", "description": description} if description else {"type": "string"}
    return FrozenDict({"type": "object", "properties": {name: told}, "required": [name], "additionalProperties": False})


def parameters(spec: ToolSpec) -> FrozenDict:
    """The schema of a tool's arguments; one string called ``input`` for a tool without a schema."""
    return spec.schema if spec.schema is not None else text_schema()


def text_parameter(spec: ToolSpec) -> str | None:
    """The name of the one string that a tool is given as plain text; None where its arguments are a JSON object."""
    schema = parameters(spec)
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or len(properties) != 1:
        return None
    ((name, value),) = properties.items()
    plain = isinstance(value, Mapping) and value.get("type") == "string" and "enum" not in value
    return str(name) if plain and tuple(schema.get("required", ())) == (name,) else None


def function_schema(spec: ToolSpec) -> dict[str, Any]:
    """The tool in the form of OpenAI's ``tools`` list and of chat templates."""
    told = {"name": spec.name, "description": spec.description, "parameters": thaw(parameters(spec))}
    return {"type": "function", "function": told}


def encode_arguments(spec: ToolSpec, arguments: Mapping[str, Any]) -> str:
    """The text that an action holds: the one string of a text tool, else JSON with sorted keys."""
    name = text_parameter(spec)
    if name is not None and isinstance(arguments.get(name), str) and len(arguments) == 1:
        return str(arguments[name])
    return json.dumps(thaw(arguments), ensure_ascii=False, sort_keys=True)


def decode_arguments(spec: ToolSpec, argument: str) -> dict[str, Any]:
    """The inverse of :func:`encode_arguments`. Raises ``ValueError`` with a sentence for the model."""
    name = text_parameter(spec)
    if name is not None:
        return {name: argument}
    found = parse_json(argument)
    if not isinstance(found, dict):
        raise ValueError(f"expected a JSON object of arguments, found {_short(found)}")
    return found


def parse_json(text: str) -> Any:
    """Strict JSON: no NaN, no infinities; halves of UTF-16 pairs become U+FFFD. Raises ``ValueError``, nothing else."""
    try:
        found = json.loads(text, parse_constant=_no_constant)
        return json.loads(_SURROGATE.sub("\ufffd", json.dumps(found, ensure_ascii=False)))
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"expected JSON: {error.msg} at character {error.pos}") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"expected JSON, found {name}, which JSON does not know")


def violation(schema: Mapping[str, Any], arguments: Any) -> str:
    """What is wrong with ``arguments``, as one line that starts with the place; empty when they fit the schema."""
    from jsonschema.exceptions import best_match

    try:
        found: Any = best_match(_validator(freeze(schema)).iter_errors(arguments))
    except Exception as error:  # nested too deeply, or a schema that refers to a part that it does not have
        return f"the arguments could not be checked: {type(error).__name__}"
    if found is None:
        return ""
    place = ".".join(str(part) for part in found.absolute_path)
    message = " ".join(found.message.split())
    return f"{place}: {message:.200}" if place else f"{message:.200}"


@functools.lru_cache(maxsize=256)
def _validator(schema: FrozenDict) -> Any:
    from jsonschema import Draft202012Validator

    return Draft202012Validator(thaw(schema))


def check_schema(schema: Any, *, what: str) -> FrozenDict:
    """``schema`` frozen. Raises ``ConfigError`` unless it is a JSON schema of an object that refers to itself only."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError

    if not isinstance(schema, Mapping) or schema.get("type") != "object":
        raise ConfigError(f"{what}: expected the JSON schema of an object of arguments, found {_short(thaw(schema))}")
    try:
        Draft202012Validator.check_schema(thaw(schema))
    except SchemaError as error:
        raise ConfigError(f"{what}: expected a JSON schema: {error.message:.200}") from None
    if (reference := _foreign(schema)) is not None:  # it would be fetched
        raise ConfigError(f"{what}: expected a schema that refers to its own parts (#/...), found {reference!r:.100}")
    return FrozenDict(schema)


def _foreign(schema: Any) -> Any:
    """The first reference that leads out of the schema."""
    if isinstance(schema, Mapping):
        found = [v for k, v in schema.items() if k in ("$ref", "$dynamicRef") and not str(v).startswith("#")]
        return found[0] if found else _foreign(list(schema.values()))
    if isinstance(schema, (list, tuple)):
        return next((found for part in schema if (found := _foreign(part)) is not None), None)
    return None


def example_argument(spec: ToolSpec) -> str | None:
    """The argument of a call that the tool would take; None when none can be made from its schema."""
    schema = thaw(parameters(spec))
    value = _example(schema, schema, 0)
    return encode_arguments(spec, value) if isinstance(value, dict) and not violation(schema, value) else None


def _example(schema: Any, root: Mapping[str, Any], depth: int) -> Any:
    """A small value of a schema, as well as can be guessed."""
    if not isinstance(schema, Mapping) or depth > 8:
        return None
    for word in ("const", "default"):
        if word in schema:
            return schema[word]
    for word in ("enum", "examples"):
        if schema.get(word):
            return schema[word][0]
    for word in ("anyOf", "oneOf", "allOf"):
        if schema.get(word):
            return _example(schema[word][0], root, depth + 1)
    reference = schema.get("$ref")
    if isinstance(reference, str):
        return _example(_local(root, reference), root, depth + 1)
    return _example_of_type(schema, root, depth)


def _example_of_type(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> Any:
    kind = schema.get("type", "string")
    if kind == "object" or "properties" in schema:
        properties = schema.get("properties", {})
        return {name: _example(properties.get(name, {}), root, depth + 1) for name in schema.get("required", ())}
    if kind == "array":
        items = schema.get("items", {})
        return [_example(items, root, depth + 1) for _ in range(min(int(schema.get("minItems", 0)), 8))]
    simple = {"string": "x" * min(max(int(schema.get("minLength", 1)), 1), 64), "boolean": True, "null": None}
    return simple.get(str(kind), schema.get("minimum", 1))


def _local(root: Mapping[str, Any], reference: str) -> Any:
    """What ``#/$defs/Name`` points to."""
    found: Any = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        found = found.get(part, {}) if isinstance(found, Mapping) else {}
    return found


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 100 else f"{text[:100]}..."
