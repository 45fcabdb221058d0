# SPDX-License-Identifier: BSD-3-Clause
"""A user's own rule from its string, and back."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.core.policies import POLICIES, parse_policy
from paceline.core.policy_import import import_policy, split_own
from paceline.errors import SpecError

SOURCE = """
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from paceline import Policy, SpecError


@dataclass(frozen=True)
class Plain(Policy):
    pass


class Undecorated(Policy):
    pass


@dataclass(frozen=True)
class Every(Policy):
    count: int
    share: float = 0.5
    fast: bool = False
    word: Literal["one", "two"] = "one"
    most: int | None = field(default=None, kw_only=True)
    sizes: tuple[int, ...] = field(default_factory=tuple, init=False)

    def __post_init__(self):
        if self.count < 0:
            raise SpecError(f"count must be >= 0, got {self.count}")
        if self.share > 1:
            raise ValueError("too much")


@dataclass(frozen=True)
class Named(Policy):
    size: int = field(kw_only=True)


@dataclass(frozen=True)
class Unknown(Policy):
    size: Missing


class NoRule:
    pass


number = 3
"""


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Return a function that writes a module; all are forgotten at the end."""
    before = set(sys.modules)

    def write(name: str, source: str = SOURCE) -> None:
        path = tmp_path / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)

    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("rules:Majority", ("rules", "Majority", "")),
        ("rules:Majority:3", ("rules", "Majority", "3")),
        (" my.rules:Majority:3,size=2:1 ", ("my.rules", "Majority", "3,size=2:1")),
        ("backup:2", None),
        ("softsync:c=4", None),
        ("backup", None),
        ("rules:", None),
        ("2:Majority", None),
        ("rules:Majority.Inner", None),
        ("deadline:0.9,after=2s", None),
    ],
)
def test_string_is_split_into_module_class_and_values(text, parts):
    assert split_own(text) == parts


@pytest.mark.parametrize(
    ("text", "shortest"),
    [
        ("rules_a:Plain", "rules_a:Plain"),
        ("rules_a:Plain:", "rules_a:Plain"),
        ("rules_a:Undecorated", "rules_a:Undecorated"),
        ("rules_a:Every:3", "rules_a:Every:3"),
        ("rules_a:Every:count=3,share=0.5", "rules_a:Every:3"),
        (
            "rules_a:Every:3,0.25,true,two,most=4",
            "rules_a:Every:3,share=0.25,fast=true,word=two,most=4",
        ),
        ("rules_a:Named:size=2", "rules_a:Named:size=2"),
    ],
)
def test_string_of_an_own_rule_parses_to_an_equal_rule(text, shortest, own, tmp_path):
    own("rules_a")
    policy = parse_policy(text, [tmp_path])
    assert str(policy) == shortest
    assert parse_policy(shortest, [tmp_path]) == policy


def test_values_have_their_declared_types(own, tmp_path):
    own("rules_b")
    policy = parse_policy("rules_b:Every:3,0.25,true,two,most=4", [tmp_path])
    assert (policy.count, policy.share, policy.fast) == (3, 0.25, True)
    assert (policy.word, policy.most) == ("two", 4)


def test_class_that_a_package_passes_on_has_the_string_of_its_own_module(own, tmp_path):
    own("pack.rules")
    own("pack.__init__", "from pack.rules import Plain as Simple")
    policy = parse_policy("pack:Simple", [tmp_path])
    assert str(policy) == "pack.rules:Plain"
    assert parse_policy(str(policy), [tmp_path]) == policy


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("rules_c:Every", "count is missing; write rules_c:Every:count,share,fast,word,most"),
        ("rules_c:Every:two", "count must be a whole number, got 'two'"),
        ("rules_c:Every:-1", "count must be >= 0, got -1"),
        ("rules_c:Every:1,share=2", "too much"),
        ("rules_c:Every:1,fast=1", "fast must be true or false, got '1'"),
        ("rules_c:Every:1,sizes=2", "'sizes' is not one of its settings"),
        ("rules_c:Plain:3", "'3' is one value too many; write rules_c:Plain"),
        ("rules_c:Unknown:3", "types of its settings can't be found: name 'Missing'"),
        ("rules_c:Nothing", r"module rules_c \(.*rules_c.py\) has no class Nothing"),
        ("rules_c:NoRule", "must be a class that derives from paceline.Policy"),
        ("rules_c:number", "must be a class that derives from paceline.Policy"),
        ("sys:Majority", r"module sys \(built in\) has no class Majority"),
        ("broken:Majority", "module broken can't be imported: SyntaxError"),
        ("raising:Majority", "module raising can't be imported: RuntimeError: not today"),
        ("needing:Majority", "module needing can't be imported: No module named 'nowhere'"),
        ("__main__:Majority", "in a script or a notebook"),
    ],
)
def test_wrong_rule_is_refused_with_the_reason(text, complaint, own, tmp_path):
    own("rules_c")
    own("broken", "class :")
    own("raising", "raise RuntimeError('not today')")
    own("needing", "import nowhere")
    with pytest.raises(SpecError, match=complaint) as error:
        parse_policy(text, [tmp_path])
    assert f"policy {text!r}: " in str(error.value)


@pytest.mark.parametrize("name", ["gone", "gone.rules"])
def test_error_names_the_folders_that_were_searched(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError) as error:
        parse_policy(f"{name}:Majority", ["", "there"])
    assert str(error.value) == (
        f"policy '{name}:Majority': there is no module gone in {tmp_path} or {tmp_path}/there, "
        "and none of that name is installed"
    )


def test_module_is_searched_in_the_current_folder_by_default(own, tmp_path, monkeypatch):
    own("rules_d")
    monkeypatch.chdir(tmp_path)
    assert str(parse_policy("rules_d:Plain")) == "rules_d:Plain"


def test_search_leaves_the_path_as_it_was(own, tmp_path):
    own("rules_e")
    before = list(sys.path)
    import_policy("rules_e", "Plain", [tmp_path])
    with pytest.raises(SpecError):
        import_policy("rules_f", "Plain", [tmp_path])
    assert sys.path == before


def test_built_in_rule_comes_before_a_module_of_its_name(own, tmp_path):
    own("backup")
    assert isinstance(parse_policy("backup:1", [tmp_path]), POLICIES["backup"])
    with pytest.raises(SpecError, match="b must be a whole number, got 'Plain'"):
        parse_policy("backup:Plain", [tmp_path])
