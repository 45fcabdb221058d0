# SPDX-License-Identifier: BSD-3-Clause
"""Imports point one way: errors, spec <- core <- trace <- {sim, run, watch} <- lab <- cli."""

import ast
import sys
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import paceline

SRC = Path(paceline.__file__).parent
FACADE = "paceline"

BOTTOM = {"errors", "files", "release", "spec", "latency", "leases"}
MIDDLE = BOTTOM | {"core"}
MAY_IMPORT = {
    "errors": set(),
    "files": set(),
    "release": set(),
    "interrupts": set(),
    "__main__": {"cli", "interrupts"},
    "spec": {"errors"},
    "latency": {"errors", "spec"},
    "leases": {"errors"},
    "core": {"errors", "spec", "leases"},
    "admission": {"errors", "core", "forecast"},
    "forecast": {"core"},
    "trace": {"errors", "files", "spec", "leases", "core"},
    "watch": {"errors", "files", "spec", "leases", "core", "trace"},
    "sim": MIDDLE | {"trace", "admission"},
    "run": MIDDLE | {"trace", "admission"},
    "lab": MIDDLE | {"trace", "sim", "run", "watch"},
    "cli": MIDDLE | {"trace", "sim", "run", "watch", "lab", "interrupts", FACADE},
}
"""The packages that each package may import besides itself."""

RUN_MAY_IMPORT = {
    "process_status": set(),
    "cores": set(),
    "system": {"process_status"},
    "settings": {"tensors.state_spec"},
    "tensors": {"settings"},
    "net": {"settings", "system", "tensors"},
    "launch": {"settings", "system", "process_status", "cores", "net"},
    "worker": {"settings", "system", "tensors", "net", "launch.environment"},
    "server": {
        "settings",
        "system",
        "cores",
        "tensors",
        "net",
        "launch.environment",
        "launch.run_folder",
    },
    "agent": {"launch.environment", "server"},
    "prepare_arguments": set(),
    "step_hooks": set(),
    "saving": {"launch.environment"},
    "script": {
        "system",
        "settings",
        "prepare_arguments",
        "step_hooks",
        "saving",
        "tensors",
        "net",
        "launch",
        "worker",
        "server",
    },
}
"""The parts of `run` that each part may import besides itself; worker and server never meet."""


def module_name(path):
    """The dotted name of a file of the package."""
    parts = (FACADE, *path.relative_to(SRC).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(SRC.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in FILES.items()}


def imports(name):
    """The full name of every module that a module imports, wherever the import stands."""
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import in line {node.lineno}"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in FILES else node.module


def package(name):
    """Return the top-level package or module of ours that this is in."""
    return name.removeprefix(FACADE + ".").partition(".")[0]


def is_ours(name):
    return name == FACADE or name.startswith(FACADE + ".")


def allowed(importer, imported):
    """Whether a module of ours may import another."""
    packages = MAY_IMPORT[package(importer)]
    exact = imported.removeprefix(FACADE + ".")
    return package(imported) in {package(importer), *packages} or exact in packages


def test_there_is_something_to_walk():
    assert {"paceline.errors", "paceline.core.decider", "paceline.core.policies.sync"} <= set(FILES)


def test_every_package_has_its_rules():
    packages = {package(name) for name in FILES} - {FACADE}
    assert packages <= set(MAY_IMPORT)


def test_imports_point_one_way():
    wrong = [
        f"{name} imports {other}"
        for name in FILES
        if name != FACADE
        for other in imports(name)
        if is_ours(other) and not allowed(name, other)
    ]
    assert wrong == []


def part_of_run(name):
    """The part of `run` that a module is in: "worker" for paceline.run.worker.batch_stream."""
    return name.removeprefix(f"{FACADE}.run.").partition(".")[0]


def test_imports_inside_run_point_one_way():
    modules = [name for name in FILES if name.startswith(f"{FACADE}.run.")]
    wrong = []
    for name in modules:
        may = RUN_MAY_IMPORT[part_of_run(name)] | {part_of_run(name)}
        for other in imports(name):
            if other in modules and part_of_run(other) not in may:
                exact = other.removeprefix(f"{FACADE}.run.")
                wrong += [f"{name} imports {other}"] * (exact not in may)
    assert wrong == []


def test_worker_and_server_never_import_each_other():
    pairs = {(part_of_run(name), part_of_run(other)) for name in FILES for other in imports(name)}
    assert not pairs & {("worker", "server"), ("server", "worker")}


def test_no_class_name_exists_twice():
    classes = [
        node.name for tree in TREES.values() for node in tree.body if isinstance(node, ast.ClassDef)
    ]
    assert sorted(name for name, count in Counter(classes).items() if count > 1) == []


def test_core_uses_only_the_standard_library_besides():
    wrong = [
        f"{name} imports {other}"
        for name in FILES
        if package(name) in ("core", "errors", "spec")
        for other in imports(name)
        if not is_ours(other) and other.partition(".")[0] not in sys.stdlib_module_names
    ]
    assert wrong == []


def test_sim_and_run_never_import_each_other():
    pairs = {(package(name), package(other)) for name in FILES for other in imports(name)}
    assert not pairs & {("sim", "run"), ("run", "sim")}


def test_only_run_and_lab_import_torch():
    importers = {
        package(name) for name in FILES for other in imports(name) if package(other) == "torch"
    }
    assert importers <= {"run", "lab"}


def test_no_function_imports_anything():
    wrong = [
        f"{name}:{node.lineno}"
        for name, tree in TREES.items()
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert wrong == []


def test_only_the_facade_and_the_command_line_load_modules_of_ours_by_name():
    """They are the top, so nothing can point the wrong way that this walk does not see.

    The fork server loads what scripts import, and the core loads the rules of users. The figures
    load matplotlib, the closed forms scipy and the lab its own extra packages, which are optional.
    """
    by_name = {
        name
        for name in FILES
        if any(other.partition(".")[0] == "importlib" for other in imports(name))
    }
    assert by_name <= {
        FACADE,
        f"{FACADE}.__main__",
        f"{FACADE}.cli",
        f"{FACADE}.core.policy_import",
        f"{FACADE}.lab.extras",
        f"{FACADE}.run.launch.fork_loop",
        f"{FACADE}.sim.orderstats",
        f"{FACADE}.watch.figures",
    }


def test_there_are_no_import_cycles():
    graph = {name: {o for o in imports(name) if is_ours(o)} for name in FILES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" <- ".join(error.args[1])) from None
