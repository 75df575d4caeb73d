"""CustomResourceDefinitions' structural schemas, for the API server double: what they may say, and what objects may be.

CEL rules (x-kubernetes-validations) are accepted and not evaluated.
"""

from __future__ import annotations

import re
from typing import Any

from tests.kubernetes.api_status import Cause, Object, forbidden_field, required, unsupported, wrong

PRESERVE = "x-kubernetes-preserve-unknown-fields"
INT_OR_STRING = "x-kubernetes-int-or-string"
TYPES = ("object", "array", "string", "integer", "number", "boolean")
KEYWORDS = {
    *("type", "properties", "additionalProperties", "items", "required", "enum", "pattern", "format", "description"),
    *("title", "default", "nullable", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "uniqueItems", "example"),
    *("anyOf", "oneOf", "allOf", "not", "externalDocs", PRESERVE, INT_OR_STRING),
    *(
        "x-kubernetes-embedded-resource",
        "x-kubernetes-list-type",
        "x-kubernetes-list-map-keys",
        "x-kubernetes-map-type",
    ),
    "x-kubernetes-validations",
}
DATE_TIME = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)")


def schema_causes(  # noqa: PLR0912 - a list of rules
    schema: Object, field: str, *, structural: bool = True
) -> list[Cause]:
    """Why the real server would refuse that schema."""
    causes = [forbidden_field(f"{field}.{word}", "unknown field") for word in schema if word not in KEYWORDS]
    for word in ("exclusiveMinimum", "exclusiveMaximum", "nullable", "uniqueItems"):
        if not isinstance(schema.get(word, False), bool):
            causes.append(wrong(f"{field}.{word}", schema[word], "must be a boolean"))
    kind = schema.get("type")
    if kind is None and structural and not (schema.get(PRESERVE) or schema.get(INT_OR_STRING)):
        causes.append(required(f"{field}.type", "must not be empty for specified object fields"))
    if kind is not None and kind not in TYPES:
        causes.append(unsupported(f"{field}.type", kind, list(TYPES)))
    if kind is not None and not structural:
        causes.append(forbidden_field(f"{field}.type", "must be empty to be structural"))
    if "properties" in schema and schema.get("additionalProperties"):
        causes.append(
            forbidden_field(f"{field}.additionalProperties", "additionalProperties and properties are mutual exclusive")
        )
    if kind == "array" and "items" not in schema and structural:
        causes.append(required(f"{field}.items", "must be specified"))
    if "default" in schema and structural:
        causes += value_causes(schema, schema["default"], f"{field}.default")
    for name, below in (schema.get("properties") or {}).items():
        causes += schema_causes(below, f"{field}.properties[{name}]", structural=structural)
    for word in ("items", "additionalProperties"):
        if isinstance(schema.get(word), dict):
            causes += schema_causes(schema[word], f"{field}.{word}", structural=structural)
    for word in ("anyOf", "oneOf", "allOf"):
        for place, below in enumerate(schema.get(word) or []):
            if not schema.get(INT_OR_STRING):
                causes += schema_causes(below, f"{field}.{word}[{place}]", structural=False)
    return causes


def pruned(schema: Object, value: Any, *, root: bool = True) -> Any:
    """The value without the fields that the schema does not know, and with its defaults."""
    if isinstance(value, list):
        return [pruned(schema.get("items") or {PRESERVE: True}, item, root=False) for item in value]
    if not isinstance(value, dict):
        return value
    properties: Object = schema.get("properties") or {}
    more = schema.get("additionalProperties")
    keep = schema.get(PRESERVE) or more is True
    always = ("apiVersion", "kind", "metadata") if root or schema.get("x-kubernetes-embedded-resource") else ()
    result = {}
    for key, below in value.items():
        if key in always:
            result[key] = below
        elif key in properties:
            if below is None and not properties[key].get("nullable"):
                continue
            result[key] = pruned(properties[key], below, root=False)
        elif isinstance(more, dict):
            result[key] = pruned(more, below, root=False)
        elif keep:
            result[key] = below
    for key, below in properties.items():
        if key not in result and "default" in below:
            result[key] = pruned(below, below["default"], root=False)
    return result


def value_causes(schema: Object, value: Any, field: str) -> list[Cause]:
    """Why the real server would refuse that value."""
    if value is None and schema.get("nullable"):
        return []
    if schema.get(INT_OR_STRING):
        fits = isinstance(value, int | str) and not isinstance(value, bool)
        return [] if fits else [_wrong_type(field, value, "integer,string")]
    kind = schema.get("type")
    if kind is not None and not _is_a(value, kind):
        return [_wrong_type(field, value, kind)]
    causes = _plain_causes(schema, value, field)
    if isinstance(value, dict):
        causes += _object_causes(schema, value, field)
    elif isinstance(value, list):
        for place, item in enumerate(value):
            causes += value_causes(schema.get("items") or {}, item, f"{field}[{place}]")
        causes += _size_causes(schema, len(value), field, "Items", "items")
    elif isinstance(value, str):
        causes += _size_causes(schema, len(value), field, "Length", "chars long")
    return causes + _combination_causes(schema, value, field)


def _object_causes(schema: Object, value: Object, field: str) -> list[Cause]:
    dot = f"{field}." if field else ""
    causes = [required(f"{dot}{name}") for name in schema.get("required") or [] if name not in value]
    properties, more = schema.get("properties") or {}, schema.get("additionalProperties")
    for key, below in value.items():
        if key in properties:
            causes += value_causes(properties[key], below, f"{dot}{key}")
        elif isinstance(more, dict):
            causes += value_causes(more, below, f"{dot}{key}")
    return causes + _size_causes(schema, len(value), field, "Properties", "properties")


def _plain_causes(schema: Object, value: Any, field: str) -> list[Cause]:
    causes = []
    if "enum" in schema and value not in schema["enum"]:
        causes.append(unsupported(field, value, schema["enum"]))
    if isinstance(value, str):
        if "pattern" in schema and re.search(schema["pattern"], value) is None:
            causes.append(wrong(field, value, f"{field} in body should match '{schema['pattern']}'"))
        if schema.get("format") == "date-time" and DATE_TIME.fullmatch(value) is None:
            causes.append(wrong(field, value, f'{field} in body must be of type date-time: "{value}"'))
    if isinstance(value, int | float) and not isinstance(value, bool):
        low, high = schema.get("minimum"), schema.get("maximum")
        if low is not None and (value < low or (value == low and schema.get("exclusiveMinimum"))):
            than = "greater than" if schema.get("exclusiveMinimum") else "greater than or equal to"
            causes.append(wrong(field, value, f"{field} in body should be {than} {low}"))
        if high is not None and (value > high or (value == high and schema.get("exclusiveMaximum"))):
            than = "less than" if schema.get("exclusiveMaximum") else "less than or equal to"
            causes.append(wrong(field, value, f"{field} in body should be {than} {high}"))
    return causes


def _size_causes(schema: Object, size: int, field: str, word: str, what: str) -> list[Cause]:
    low, high = schema.get(f"min{word}"), schema.get(f"max{word}")
    if low is not None and size < low:
        return [wrong(field, size, f"{field} in body should have at least {low} {what}")]
    if high is not None and size > high:
        return [
            (
                "FieldValueTooMany" if word == "Items" else "FieldValueTooLong",
                field,
                f"Too long: may not be more than {high} {what}",
            )
        ]
    return []


def _combination_causes(schema: Object, value: Any, field: str) -> list[Cause]:
    causes = [cause for below in schema.get("allOf") or [] for cause in value_causes(below, value, field)]
    fits = {
        word: [not value_causes(below, value, field) for below in schema.get(word) or []] for word in ("anyOf", "oneOf")
    }
    if fits["anyOf"] and not any(fits["anyOf"]):
        causes.append(wrong(field, value, f"{field} in body must validate at least one schema (anyOf)"))
    if fits["oneOf"] and sum(fits["oneOf"]) != 1:
        causes.append(wrong(field, value, f"{field} in body must validate one and only one schema (oneOf)"))
    if "not" in schema and not value_causes(schema["not"], value, field):
        causes.append(wrong(field, value, f"{field} in body must not validate the schema (not)"))
    return causes


def _is_a(value: Any, kind: str) -> bool:
    match kind:
        case "object":
            return isinstance(value, dict)
        case "array":
            return isinstance(value, list)
        case "string":
            return isinstance(value, str)
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            return isinstance(value, int) and not isinstance(value, bool)
        case _:
            return isinstance(value, int | float) and not isinstance(value, bool)


def _wrong_type(field: str, value: Any, kind: str) -> Cause:
    names = {
        dict: "object",
        list: "array",
        str: "string",
        bool: "boolean",
        int: "integer",
        float: "number",
        type(None): "null",
    }
    found = names[type(value)]
    return (
        "FieldValueTypeInvalid",
        field,
        f'Invalid value: "{found}": {field} in body must be of type {kind}: "{found}"',
    )
