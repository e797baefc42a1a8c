"""Log lines: readable, one line each, no way to forge one."""

import io
import json

import pytest

from shoal.hosts import logs


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


def test_text_lines_carry_fields_as_key_and_value(stream: io.StringIO) -> None:
    logs.setup(stream=stream)
    logs.get("supervisor").warning("child ended", child="picker-0", wait_s=0.2, last_line="no such file", code=None)
    line = stream.getvalue()
    assert " WARNING supervisor: child ended child=picker-0 wait_s=0.2" in line
    assert 'last_line="no such file" code=-' in line


def test_a_value_cannot_start_a_line_of_its_own(stream: io.StringIO) -> None:
    logs.setup(stream=stream)
    logs.get("supervisor").info("seen", name="x\n2026-01-01 ERROR forged")
    assert stream.getvalue().count("\n") == 1


def test_json_lines_are_objects_and_a_field_does_not_replace_the_message(stream: io.StringIO) -> None:
    logs.setup(log_format=logs.JSON, stream=stream)
    logs.get("supervisor").info("ready", url="http://x", message="other")
    entry = json.loads(stream.getvalue())
    assert (entry["level"], entry["logger"], entry["message"]) == ("info", "supervisor", "ready")
    assert (entry["url"], entry["message_"]) == ("http://x", "other")


def test_lines_below_the_level_are_not_written(stream: io.StringIO) -> None:
    logs.setup(level="warning", stream=stream)
    logs.get("supervisor").info("quiet")
    assert stream.getvalue() == ""
