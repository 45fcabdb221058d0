# SPDX-License-Identifier: BSD-3-Clause
"""Parse latency strings. The grammar, in which white space is optional:

    latency  := base (';' modifier)*
    base     := sum  |  percent sum ('|' percent sum)+      alternatives; they add up to 100 %
    sum      := term ('+' term)*                            independent times
    term     := [percent] (duration | name ':' settings)    with this probability, otherwise 0
    modifier := 'worker' ids 'x' factor                     always this many times slower
              | 'phases x' factor 'for' duration 'every' duration ['on worker' ids] ['together']

Ids look like 7 or 0,3-5. In alternatives, the first percentage is the weight of the alternative;
otherwise it belongs to its term. `str` of a parsed value parses back to an equal value.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from paceline.errors import SpecError
from paceline.latency.distributions import (
    PLAIN_NUMBERS,
    Constant,
    Distribution,
    Exponential,
    Gamma,
    LogNormal,
    Mixture,
    Named,
    Pareto,
    Sometimes,
    Sum,
    Weibull,
)
from paceline.latency.streams import Latency, Phases
from paceline.latency.text import parse_ids, split_percent
from paceline.spec import parse_number, parse_seconds, split_call

__all__ = ["parse_latency"]

_PLUS = re.compile(r"(?<!\d[eE])\+")  # not the plus of 1e+3
_SLOWER = re.compile(r"workers?\s*(.*?)\s*x\s*(.*)")
_PHASES = re.compile(
    r"phases\s*x\s*(.*?)\s*for\s*(.*?)\s*every\s*(.*?)\s*(?:on\s*workers?\s*(.*?))?\s*(together)?"
)


_KINDS: dict[str, type[Named]] = {
    kind.name(): kind for kind in (Constant, Exponential, LogNormal, Gamma, Pareto, Weibull)
}


def parse_latency(text: str) -> Latency:
    """Parse a latency such as "50ms + 5% exp:500ms; worker 7 x2.2"."""
    base, *modifiers = (part.strip() for part in text.split(";"))
    latency = Latency(_parse_base(base))
    for modifier in modifiers:
        with _reading(modifier, "workers 0,3-5 x2.2 or phases x3 for 5s every 60s on worker 2"):
            latency = _modify(latency, modifier)
    return latency


def _modify(latency: Latency, text: str) -> Latency:
    if found := _SLOWER.fullmatch(text):
        factor = parse_number(found[2], "factor")
        slower = tuple((worker, factor) for worker in parse_ids(found[1]))
        return replace(latency, factors=latency.factors + slower)
    if found := _PHASES.fullmatch(text):
        factor = parse_number(found[1], "factor")
        lengths = parse_seconds(found[2], "for"), parse_seconds(found[3], "every")
        workers = None if found[4] is None else parse_ids(found[4])
        phases = Phases(factor, *lengths, workers, together=found[5] is not None)
        return replace(latency, phases=(*latency.phases, phases))
    raise SpecError(f"{text!r} is not a modifier")


def _parse_base(text: str) -> Distribution:
    if "|" not in text:
        return _parse_sum(text)
    weights, parts = [], []
    for alternative in text.split("|"):
        weight, rest = split_percent(alternative)
        if weight is None:
            raise SpecError(f"{rest!r} has no percentage; write 95% 50ms | 5% exp:500ms")
        weights.append(weight)
        parts.append(_parse_sum(rest))
    with _reading(text, "95% 50ms | 5% exp:500ms"):
        return Mixture(tuple(weights), tuple(parts))


def _parse_sum(text: str) -> Distribution:
    terms = tuple(_parse_term(term) for term in _PLUS.split(text))
    return Sum(terms) if len(terms) > 1 else terms[0]


def _parse_term(text: str) -> Distribution:
    probability, rest = split_percent(text)
    name, colon, _ = (piece.strip() for piece in rest.partition(":"))
    part: Distribution
    if name in _KINDS:
        with _reading(rest, f"{_KINDS[name].form()} as in {_KINDS[name].example}"):
            part = _parse_named(_KINDS[name], rest)
    elif colon:
        names = ", ".join(_KINDS)
        raise SpecError(f"distribution must be one of {names}, got {rest!r}; write exp:500ms")
    else:
        with _reading(rest, "50ms or exp:500ms"):
            part = Constant(parse_seconds(rest, "latency"))
    return part if probability is None else Sometimes(probability, part)


def _parse_named(kind: type[Named], text: str) -> Distribution:
    settings = kind.settings()
    _, values, named = split_call(text)
    if len(values) > len(settings):
        raise SpecError(f"{values[len(settings)]!r} is one value too many")
    given = dict(zip(settings, values, strict=False))
    wrong = [f"{key} is given twice" for key in named if key in given]
    wrong += [f"{key!r} is not a setting" for key in named if key not in settings]
    given |= named
    wrong += [f"{key} is missing" for key in settings if key not in given and key != "shift"]
    if wrong:
        raise SpecError(wrong[0])
    numbers = {
        settings[key]: (parse_number if key in PLAIN_NUMBERS else parse_seconds)(value, key)
        for key, value in given.items()
    }
    build: Callable[..., Distribution] = kind  # mypy only knows the base class's arguments
    return build(**numbers)


@contextmanager
def _reading(part: str, right: str) -> Iterator[None]:
    """Add the offending part of the string and the correct form to a SpecError."""
    try:
        yield
    except SpecError as error:
        where = "" if repr(part) in str(error) else f" in {part!r}"
        raise SpecError(f"{error}{where}; write {right}") from None
