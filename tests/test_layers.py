"""The arrows of the design: who may import whom. Read from the source, so that lazy imports count too."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

HEAVY = {"torch", "triton", "tilelang", "flash_attn", "flash_attn_interface", "flashinfer"}
"""Libraries that take seconds to import, or need a GPU."""

PLOTTING = {"matplotlib", "pandas", "seaborn", "scipy"}

LIGHT = (
    *("harness.study", "harness.workloads", "harness.families"),
    *("harness.record", "harness.cost", "harness.stats", "harness.render", "harness.tuning", "harness.unseen"),
)
"""What reads studies and renders reports: it must work where no library of :data:`HEAVY` is installed."""

MEASURING = (
    *("harness.runner", "harness.loop", "harness.tune", "harness.compiler"),
    *("harness.worker", "harness.bench", "harness.screen", "harness.examine", "harness.probes"),
)
"""The loops, and what does their work in the other process."""

TOOLS = tuple(f"harness.{tool}" for tool in ("inputs", "check", "timing", "bound", "cost", "env"))
"""What those that measure stand on."""

READERS = ("harness.compare", "harness.export", "harness.recommend", "harness.advice")
"""What answers from records alone, on a machine without a GPU."""


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for folder in ("impls", "harness") for path in (ROOT / folder).rglob("*.py")}


def imported(source: str) -> set[str]:
    """The absolute names that a source imports, inside functions too: modules, and ``module.name`` of ``from``.

    Imports under ``if TYPE_CHECKING`` never run and do not count.
    """

    def walk(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"expected absolute imports, got {ast.unparse(node)}"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        only_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for child in node.orelse if only_types else ast.iter_child_nodes(node):
            yield from walk(child)

    return set(walk(ast.parse(source)))


def imports(module: str) -> set[str]:
    return imported(MODULES[module].read_text(encoding="utf-8"))


def within(name: str, packages: tuple[str, ...] | set[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def offenders(modules: list[str], forbidden: tuple[str, ...] | set[str]) -> list[str]:
    """``module imports name`` for each import that is not allowed."""
    return [
        f"{module} imports {name}"
        for module in modules
        for name in sorted(imports(module))
        if within(name, forbidden)
    ]


def test_lazy_imports_are_seen_and_imports_for_types_are_not() -> None:
    source = (
        "from typing import TYPE_CHECKING\nimport a.b as c\nif TYPE_CHECKING:\n    import d\nelse:\n    import e\n"
        "def f():\n    from g import h\n"
    )
    assert imported(source) == {"typing", "typing.TYPE_CHECKING", "a.b", "e", "g", "g.h"}


def test_the_two_packages_are_seen() -> None:
    assert {"impls.problem", "impls.catalog", "harness.cli", "harness.study", "harness.render"} <= set(MODULES)


@pytest.mark.parametrize("names", [LIGHT, MEASURING, TOOLS, READERS])
def test_the_layers_name_modules_that_there_are(names: tuple[str, ...]) -> None:
    assert set(names) <= set(MODULES)


def test_impls_import_nothing_of_the_harness() -> None:
    assert offenders([name for name in MODULES if within(name, ("impls",))], ("harness",)) == []


def test_the_problem_is_standard_library_only() -> None:
    assert {name.partition(".")[0] for name in imports("impls.problem")} <= set(sys.stdlib_module_names)


def test_the_contract_stands_on_the_problem_alone() -> None:
    project = {name for name in imports("impls.contract") if within(name, ("impls",))}
    assert all(within(name, ("impls.problem",)) for name in project)


def test_implementations_do_not_know_one_another_or_the_oracle() -> None:
    from impls.catalog import IMPLS

    files = {target.partition(":")[0] for target in IMPLS.values()}
    for file in sorted(files & set(MODULES)):
        assert offenders([file], (files - {file}) | {"impls.reference", "impls.catalog"}) == []


def test_what_reads_and_renders_imports_no_library_of_the_kernels() -> None:
    light = [name for name in MODULES if within(name, LIGHT)]
    assert offenders(light, HEAVY) == []


def test_what_reads_and_renders_stands_on_light_modules_alone() -> None:
    """Of the harness only one another; of impls only what imports no library."""
    light = [name for name in MODULES if within(name, LIGHT)]
    allowed = (*LIGHT, "impls.problem", "impls.catalog")
    project = {
        f"{module} imports {name}"
        for module in light
        for name in imports(module)
        if within(name, ("harness", "impls")) and name not in ("harness", "impls") and not within(name, allowed)
    }
    assert project == set()


def test_what_reads_records_does_not_measure() -> None:
    assert offenders(list(READERS), (*MEASURING, "harness.selftest", "harness.experiments")) == []


def test_nobody_imports_the_command_line() -> None:
    others = [name for name in MODULES if name not in ("harness.cli", "harness.__main__")]
    assert offenders(others, ("harness.cli",)) == []


def test_the_tools_of_the_loop_do_not_import_the_loop() -> None:
    """runner -> {inputs, check, timing, bound, cost, env}, never back."""
    assert offenders(list(TOOLS), (*MEASURING, "harness.render")) == []
    assert offenders([name for name in MODULES if within(name, ("harness.render",))], MEASURING) == []


@pytest.mark.parametrize("module", ["harness.study", "harness.record", "harness.cli"])
def test_light_modules_load_nothing_heavy(module: str) -> None:
    """Asked of a fresh interpreter, so that imports of imports count."""
    code = f"import sys, {module}; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) & (HEAVY | PLOTTING | {"numpy"}) == set()


def test_rendering_loads_no_library_of_the_kernels() -> None:
    code = "import sys, harness.render; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) & HEAVY == set()


@pytest.mark.parametrize("module", sorted(name for name in MODULES if "tilelang" in name))
def test_tilelang_kernels_keep_their_annotations(module: str) -> None:
    """``from __future__ import annotations`` would turn ``T.Tensor`` into text that TileLang cannot read."""
    assert "__future__" not in imports(module)
