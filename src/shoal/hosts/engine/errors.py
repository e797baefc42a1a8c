"""Error answers in vLLM's words: an exception that carries status and body."""

import re

import msgspec

_BYTE = re.compile(r"\(byte (\d+)\)")
_PLACE = re.compile(r" - at `\$\.?(.*)`$")
_MISSING = re.compile(r"missing required field `(.*)`")


class ApiError(Exception):
    """A request that gets an error answer.

    kind: vLLM's `type`, as `BadRequestError`.  param: the field at fault, None when there is none.
    """

    def __init__(self, status: int, message: str, kind: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param

    def body(self) -> bytes:
        """Return the OpenAI error body."""
        return msgspec.json.encode(
            {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}}
        )

    def anthropic_body(self) -> bytes:
        """Return the error body of /v1/messages."""
        return msgspec.json.encode({"type": "error", "error": {"type": self.kind, "message": self.message}})


def bad_request(message: str, param: str | None = None) -> ApiError:
    """A request that cannot be served as it is."""
    return ApiError(400, message, "BadRequestError", param)


def not_found(model: str, known: list[str]) -> ApiError:
    """A model that is not served here."""
    message = f"The model `{model}` does not exist. Valid aliases: {', '.join(known)}."
    return ApiError(404, message, "NotFoundError", "model")


def unreadable(error: msgspec.DecodeError, body: bytes) -> ApiError:
    """A body that is not JSON, or JSON of the wrong shape, in the words of vLLM's validation errors."""
    text = str(error)
    if isinstance(error, msgspec.ValidationError):
        place = _PLACE.search(text)
        path = f"body.{place.group(1)}" if place and place.group(1) else "body"
        missing = _MISSING.search(text)
        if missing:
            path = f"{path}.{missing.group(1)}"
            detail = f"{{'type': 'missing', 'loc': '{path}', 'msg': 'Field required'}}"
        else:
            reason = _PLACE.sub("", text).replace("`", "")
            detail = f"{{'type': 'value_error', 'loc': '{path}', 'msg': '{reason}'}}"
    else:
        found = _BYTE.search(text)
        path = f"body.{found.group(1) if found else len(body)}"
        detail = (
            f"{{'type': 'json_invalid', 'loc': '{path}', 'msg': 'JSON decode error', "
            f"'input': '<dict of 0 items>', 'ctx': {{'error': '{_BYTE.sub('', text).strip()}'}}}}"
        )
    return ApiError(400, f"1 validation error:\n  {detail}", "Bad Request", path)
