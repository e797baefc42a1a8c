"""Multipart forms, as the audio API sends them."""

from email.parser import BytesParser
from email.policy import HTTP

from shoal.hosts.engine.errors import bad_request


def read_form(body: bytes, content_type: str) -> dict[str, bytes]:
    """Return the fields of a multipart form by name.  Raises ApiError 400 when it is none."""
    if not content_type.lower().startswith("multipart/form-data"):
        raise bad_request("Expected a multipart/form-data body.", "body")
    head = f"Content-Type: {content_type}\r\n\r\n".encode()
    message = BytesParser(policy=HTTP).parsebytes(head + body)
    if not message.is_multipart():
        raise bad_request("The multipart body cannot be read.", "body")
    fields: dict[str, bytes] = {}
    for part in message.iter_parts():
        name = part.get_param("name", header="content-disposition")
        payload = part.get_payload(decode=True)
        if isinstance(name, str) and isinstance(payload, bytes):
            fields[name] = payload
    return fields
