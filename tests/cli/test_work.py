# SPDX-License-Identifier: BSD-3-Clause
"""`paceline work`: wrong input; test_work_launcher.py has runs."""

import pytest

from cli_fixtures import refuse_wrong_input


@pytest.mark.parametrize(
    "wrong",
    [
        ("no.py --connect 127.0.0.1:1 --token-file token", 2, "script no.py does not exist"),
        ("script.py --connect here --token-file token", 2, "an address must be HOST:PORT"),
        ("script.py --connect 127.0.0.1:0 --token-file token", 2, "needs the port of the server"),
        ("script.py --connect 127.0.0.1:1 --token-file no", 2, "cannot read the token in "),
        ("script.py --connect 127.0.0.1:1 --token-file open", 2, "chmod 600"),
        (
            "script.py --connect 127.0.0.1:1 --token-file token --tls-ca no.pem",
            2,
            "no.pem",
        ),
        (
            "script.py --connect 127.0.0.1:1 --token-file token --number 0 --processes 2",
            2,
            "leave it out with --processes",
        ),
    ],
)
def test_wrong_input_is_one_line(call, script, tmp_path, wrong):
    script("")
    for name, mode in (("token", 0o600), ("open", 0o644)):
        (tmp_path / name).write_text("a" * 64)
        (tmp_path / name).chmod(mode)
    words, code, named = wrong
    name, _, options = words.partition(" ")
    refuse_wrong_input(call, tmp_path, (f"work {options} {name}", code, named))
