"""docs/troubleshooting.md quotes what the library really says: each message there is provoked, and the reverse."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from script import script

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "troubleshooting.md").read_text()


@pytest.fixture(scope="module")
def page():
    return script("scripts/troubleshooting.py")


@pytest.fixture(scope="module")
def messages(page):
    return page.messages()


def test_the_page_quotes_what_the_library_says(page, messages):
    assert page.renewed(TEXT, messages) == TEXT, "run `make table`"


def test_every_provoked_message_is_quoted_and_every_quote_provoked(page, messages):
    named = [name for names, _ in page.BLOCK.findall(TEXT) for name in names.split(", ")]
    assert sorted(named) == sorted(messages)
    assert len(page.BLOCK.findall(TEXT)) == len(re.findall(r"^```text$", TEXT, re.MULTILINE))


def test_every_message_says_what_was_wanted_and_what_came(messages):
    for name, message in messages.items():
        others = ("UnsupportedError: ", "KernelError: ")
        assert re.search(r"want .*got ", message) or message.startswith(others), name


def test_a_message_that_changed_is_seen(page, messages):
    changed = {**messages, "window": "ValueError: window: no"}
    assert page.renewed(TEXT, changed) != TEXT
