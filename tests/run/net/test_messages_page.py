# SPDX-License-Identifier: BSD-3-Clause
"""The tables of docs/protocol.md are those of run/messages.py.

`python tests/test_protocol_page.py` writes them anew.
"""

import inspect
from pathlib import Path
from typing import get_args

import msgspec

from paceline.run.net import messages

PAGE = Path(__file__).parents[3] / "docs" / "protocol.md"
MARK = "<!-- tables -->\n"


def table(title, messages):
    lines = [f"## {title}", "", "| number | message | fields | what it says |", "|---|---|---|---|"]
    for message in sorted(messages, key=lambda m: m.__struct_config__.tag):
        fields = ", ".join(f"`{field.name}`" for field in msgspec.structs.fields(message))
        says = " ".join(inspect.getdoc(message).split())
        number = message.__struct_config__.tag
        lines.append(f"| {number} | `{message.__name__}` | {fields} | {says} |")
    return "\n".join(lines) + "\n"


def tables():
    from_worker = {*get_args(messages.FromStranger), *get_args(messages.FromWorker)}
    return "\n" + "\n".join(
        [
            table("From a worker", from_worker),
            table("From the server", get_args(messages.FromServer)),
        ]
    )


def test_the_page_has_the_tables_of_the_code():
    assert PAGE.read_text(encoding="utf-8").partition(MARK)[2] == tables()


def test_numbers_are_given_once():
    kinds = (
        *get_args(messages.FromStranger),
        *get_args(messages.FromWorker),
        *get_args(messages.FromServer),
    )
    numbers = [message.__struct_config__.tag for message in kinds]
    assert len(numbers) == len(set(numbers))


if __name__ == "__main__":
    before = PAGE.read_text(encoding="utf-8").partition(MARK)[0]
    PAGE.write_text(before + MARK + tables(), encoding="utf-8")
