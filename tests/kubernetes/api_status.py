"""The API server double's errors: `Status` objects as the real server words them."""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]


class ApiError(Exception):
    """A request that is refused."""

    def __init__(
        self,
        code: int,
        reason: str,
        message: str,
        details: Object | None = None,
        *,
        retry_after_seconds: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code, self.reason, self.message = code, reason, message
        self.details = dict(details or {})
        self.retry_after_seconds = retry_after_seconds
        if retry_after_seconds is not None:
            self.details["retryAfterSeconds"] = retry_after_seconds

    def status(self) -> Object:
        """The reply's body."""
        status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": self.message}
        details = {"details": self.details} if self.details else {}
        return {**status, "reason": self.reason, **details, "code": self.code}


Cause = tuple[str, str, str]
"""(reason, field, message), such as ("FieldValueRequired", "spec.store", "Required value")."""


def required(field: str, why: str = "") -> Cause:
    """A field that has to be there."""
    return "FieldValueRequired", field, f"Required value{': ' if why else ''}{why}"


def wrong(field: str, value: object, why: str) -> Cause:
    """A value that may not be."""
    return "FieldValueInvalid", field, f"Invalid value: {shown(value)}: {why}"


def unsupported(field: str, value: object, known: list[Any]) -> Cause:
    """A value that is none of the known ones."""
    return (
        "FieldValueNotSupported",
        field,
        f"Unsupported value: {shown(value)}: supported values: {', '.join(shown(one) for one in known)}",
    )


def forbidden_field(field: str, why: str) -> Cause:
    """A field that may not be set or changed."""
    return "FieldValueForbidden", field, f"Forbidden: {why}"


def shown(value: object) -> str:
    """A value as Go shows it in such messages."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else "null" if value is None else str(value)


def invalid(kind: str, group: str, name: str, causes: list[Cause]) -> ApiError:
    """422, with each of the causes."""
    texts = [f"{field}: {message}" for _, field, message in causes]
    what = f"{kind}.{group}" if group else kind
    details = {
        "name": name,
        **({"group": group} if group else {}),
        "kind": kind,
        "causes": [{"reason": reason, "message": message, "field": field} for reason, field, message in causes],
    }
    text = texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"
    return ApiError(422, "Invalid", f'{what} "{name}" is invalid: {text}', details)


def bad_request(message: str) -> ApiError:
    """400."""
    return ApiError(400, "BadRequest", message)


def success(name: str, group: str, plural: str, uid: str) -> Object:
    """What a deletion that is done at once answers."""
    details = {"name": name, **({"group": group} if group else {}), "kind": plural, "uid": uid}
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}
