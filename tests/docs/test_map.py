import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_path_of_the_map_exists() -> None:
    paths = re.findall(r"`((?:src|bench|tests|docs)/[^`]+)`", (ROOT / "docs/map.md").read_text())
    assert len(paths) > 30
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_link_of_the_pages_leads_to_a_file() -> None:
    missing = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
        missing += [
            f"{page.relative_to(ROOT)}: {link}"
            for link in links
            if "://" not in link and not (page.parent / link).exists()
        ]
    assert missing == []


def test_no_two_decisions_have_one_number() -> None:
    numbers = [page.name[:4] for page in (ROOT / "docs/decisions").glob("*.md")]
    assert sorted(numbers) == sorted(set(numbers))


def test_the_reading_order_is_short_enough_to_read() -> None:
    order = re.findall(r"^\d\. \[([^\]]+)\]", (ROOT / "README.md").read_text(), re.M)
    assert len(order) == 4
    assert sum(len((ROOT / path).read_text().splitlines()) for path in order) < 1000
