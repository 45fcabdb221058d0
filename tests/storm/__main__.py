# SPDX-License-Identifier: BSD-3-Clause
"""Run storms: simulated disasters through the real runtime, each decided by its seed.

Examples:
  python tests/storm --seeds 0:1000             a thousand storms
  python tests/storm --minutes 10               as many as fit in ten minutes, from a new seed on
  python tests/storm --seed 1234 --story        one storm, with everything that happened in it
  python tests/storm --seed 1234 --faults 0,2   the same storm with only two of its faults
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # before the imports below

from storm.scenario import make_scenario  # needs the path
from storm.shrink import shrink  # likewise
from storm.storm import Outcome, run_seed, run_storm  # likewise

EVERY_S = 10.0  # between two lines about the progress


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, help="run this storm only")
    parser.add_argument("--faults", help="with --seed: only these of its faults, such as 0,2")
    parser.add_argument("--story", action="store_true", help="with --seed: print what happened")
    parser.add_argument("--seeds", help="run the storms first:last")
    parser.add_argument("--minutes", type=float, help="run new storms for this long")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="to use at a time")
    return parser.parse_args()


def main() -> int:
    """Run the storms; return 1 if one broke a law."""
    options = _options()
    if options.seed is not None:
        return _one(options)
    first, last = 0, 300
    if options.seeds:
        first, last = map(int, options.seeds.split(":"))
    elif options.minutes:
        first, last = int(time.time()), sys.maxsize
    return _many(range(first, last), options)


def _one(options: argparse.Namespace) -> int:
    scenario = make_scenario(options.seed)
    if options.faults is not None:
        scenario = scenario.only([int(one) for one in options.faults.split(",") if one])
    outcome = run_storm(scenario)
    if options.story:
        print("\n".join([*scenario.describe(), *outcome.story]))
    print(outcome.violation or f"no law was broken; exit codes {outcome.codes}")
    return 1 if outcome.violation else 0


def _many(seeds: range, options: argparse.Namespace) -> int:
    began = said = time.monotonic()
    failed, codes, count = [], Counter[str](), 0
    faults = Counter[str]()
    for outcome in _outcomes(seeds, options):
        count += 1
        codes[str(outcome.codes[-1] if outcome.codes else "-")] += 1
        faults["planned"] += outcome.scenario.fault_count
        faults["happened"] += outcome.faults
        faults["torn"] += outcome.torn_writes
        faults["parked"] += outcome.parked
        if outcome.violation:
            failed.append(outcome.scenario.seed)
            _report(outcome)
        took_s = time.monotonic() - began
        if time.monotonic() - said > EVERY_S:
            said = time.monotonic()
            print(f"{count} storms in {took_s:.0f} s, {len(failed)} broke a law", flush=True)
        if options.minutes and took_s > options.minutes * 60:
            break
    ends = ", ".join(f"{code}: {number}" for code, number in sorted(codes.items()))
    print(f"{count} storms in {time.monotonic() - began:.0f} s; exit codes {ends}")
    print(
        f"{faults['happened']} of {faults['planned']} planned faults had an effect; "
        f"{faults['torn']} writes were torn, {faults['parked']} connections waited for a server"
    )
    print(f"{count - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


def _outcomes(seeds: range, options: argparse.Namespace) -> Iterator[Outcome]:
    if options.processes == 1:
        yield from map(run_seed, seeds)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.processes, maxtasksperchild=500) as pool:
        yield from pool.imap(run_seed, seeds)


def _report(outcome: Outcome) -> None:
    """Print the smallest storm that breaks a law, and the command that repeats it."""
    seed = outcome.scenario.seed
    try:
        kept, smallest = shrink(outcome.scenario)
    except AssertionError:
        print(f"seed {seed} broke a law once, but not again: {outcome.violation}")
        return
    print(f"seed {seed}: {smallest.violation}")
    print("\n".join(f"  {line}" for line in smallest.scenario.describe()))
    faults = ",".join(map(str, kept))
    print(f"  repeat it with: make storm SEED={seed} FAULTS={faults or ','}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
