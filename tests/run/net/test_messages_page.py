# SPDX-License-Identifier: BSD-3-Clause
"""The tables in docs/protocol.md match run/net/messages.py.

Run this file with Python to regenerate them.
"""

import inspect
from pathlib import Path
from typing import get_args

import msgspec

from paceline.run.net import messages

PAGE = Path(__file__).parents[3] / "docs" / "protocol.md"
MARK = "<!-- tables -->\n"


def table(title, kinds):
    lines = [f"## {title}", "", "| number | message | fields | meaning |", "|---|---|---|---|"]
    for kind in sorted(kinds, key=lambda kind: kind.__struct_config__.tag):
        fields = ", ".join(f"`{field.name}`" for field in msgspec.structs.fields(kind))
        meaning = " ".join(inspect.getdoc(kind).split())
        number = kind.__struct_config__.tag
        lines.append(f"| {number} | `{kind.__name__}` | {fields} | {meaning} |")
    return "\n".join(lines) + "\n"


def tables():
    from_worker = {*get_args(messages.FromStranger), *get_args(messages.FromWorker)}
    return "\n" + "\n".join(
        [
            table("From a worker", from_worker),
            table("From the server", get_args(messages.FromServer)),
        ]
    )


def test_page_has_the_tables_of_the_code():
    assert PAGE.read_text(encoding="utf-8").partition(MARK)[2] == tables()


def test_message_numbers_are_unique():
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
