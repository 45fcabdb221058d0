# SPDX-License-Identifier: BSD-3-Clause
"""The tables of docs/protocol.md are those of run/wire.py.

`python tests/test_protocol_page.py` writes them anew.
"""

import inspect
from pathlib import Path
from typing import get_args

import msgspec

from paceline.run import wire

PAGE = Path(__file__).parents[1] / "docs" / "protocol.md"
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
    from_worker = {*get_args(wire.FromStranger), *get_args(wire.FromWorker)}
    return "\n" + "\n".join(
        [table("From a worker", from_worker), table("From the server", get_args(wire.FromServer))]
    )


def test_the_page_has_the_tables_of_the_code():
    assert PAGE.read_text(encoding="utf-8").partition(MARK)[2] == tables()


def test_numbers_are_given_once():
    messages = (
        *get_args(wire.FromStranger),
        *get_args(wire.FromWorker),
        *get_args(wire.FromServer),
    )
    numbers = [message.__struct_config__.tag for message in messages]
    assert len(numbers) == len(set(numbers))


if __name__ == "__main__":
    before = PAGE.read_text(encoding="utf-8").partition(MARK)[0]
    PAGE.write_text(before + MARK + tables(), encoding="utf-8")
