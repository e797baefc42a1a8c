"""The form of access-log messages, as far as records are read from them.

Envoy's own has fields that hold a client's words as they came, `x-request-id` among them, and one byte there that is no
UTF-8 makes the whole message unreadable, with the records of everybody else in it.  What is not named here is skipped
unread.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, duration_pb2, message_factory

_FIELD = descriptor_pb2.FieldDescriptorProto
_DURATION = duration_pb2.DESCRIPTOR
_PACKAGE = "shoal.records"


def _text(name: str, number: int) -> descriptor_pb2.FieldDescriptorProto:
    return _FIELD(name=name, number=number, type=_FIELD.TYPE_STRING, label=_FIELD.LABEL_OPTIONAL)


def _message(name: str, number: int, kind: str, *, is_repeated: bool = False) -> descriptor_pb2.FieldDescriptorProto:
    label = _FIELD.LABEL_REPEATED if is_repeated else _FIELD.LABEL_OPTIONAL
    return _FIELD(name=name, number=number, type=_FIELD.TYPE_MESSAGE, type_name=f".{kind}", label=label)


def _made() -> Any:
    """The class of the message: envoy.service.accesslog.v3.StreamAccessLogsMessage with its numbers of fields."""
    file = descriptor_pb2.FileDescriptorProto(name="shoal/records.proto", package=_PACKAGE, syntax="proto3")
    file.dependency.append(_DURATION.name)
    message = file.message_type.add(name="StreamAccessLogsMessage")
    message.field.append(_message("http_logs", 2, f"{_PACKAGE}.HTTPAccessLogEntries"))
    entries = file.message_type.add(name="HTTPAccessLogEntries")
    entries.field.append(_message("log_entry", 1, f"{_PACKAGE}.HTTPAccessLogEntry", is_repeated=True))
    entry = file.message_type.add(name="HTTPAccessLogEntry")
    entry.field.append(_message("common_properties", 1, f"{_PACKAGE}.AccessLogCommon"))
    common = file.message_type.add(name="AccessLogCommon")
    common.field.append(_message("custom_tags", 22, f"{_PACKAGE}.AccessLogCommon.CustomTagsEntry", is_repeated=True))
    common.field.append(_message("duration", 23, "google.protobuf.Duration"))
    tags = common.nested_type.add(name="CustomTagsEntry")
    tags.field.extend([_text("key", 1), _text("value", 2)])
    tags.options.map_entry = True
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(_DURATION.serialized_pb)
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.StreamAccessLogsMessage"))


parse_records = _made().FromString
"""Reads the bytes of one message, for `decode_records`.  Raises DecodeError for what is no such message."""
