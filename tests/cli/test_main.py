"""The command line as a whole."""

import pytest

from shoal.cli import VERBS, main


def test_without_a_verb_it_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    page = capsys.readouterr().out
    assert all(verb in page for verb in VERBS)
    assert "First try: shoal up --engines 4" in page


def test_keys_has_help_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["keys", "--help"])
    assert "shoal keys new alice --file keys.txt" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--chats", "--turns", "--engines"])
def test_a_demo_of_nothing_is_refused_before_it_starts(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["demo", flag, "0"])
    assert ended.value.code == 2
    assert f"argument {flag}: must be a whole number of 1 or more, not '0'" in capsys.readouterr().err
