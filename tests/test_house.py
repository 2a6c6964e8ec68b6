"""The house is kept: files stay short enough to be read at a sitting, and the twins share nothing with the package."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE, TESTS = sorted((ROOT / "g5cp_vec").rglob("*.py")), sorted((ROOT / "tests").rglob("*.py"))


@pytest.mark.parametrize(("files", "most"), [(PACKAGE, 400), (TESTS, 450)], ids=["package", "tests"])
def test_no_file_is_too_long(files, most):
    assert len(files) > 10
    lengths = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in files}
    too_long = {name: n for name, n in lengths.items() if n > most}
    assert not too_long, f"longer than {most} lines: split by concept"


def imported(source: str) -> set[str]:
    """Packages that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("naive" if node.level else node.module.split(".")[0])
    return found


def test_the_twins_import_plain_python_only():
    twins = sorted((ROOT / "tests" / "naive").glob("*.py"))
    assert set().union(*(imported(file.read_text()) for file in twins)) <= {
        "__future__", "collections", "fractions", "math", "naive",
    }  # fmt: skip
    assert imported("def f():\n    from g5cp_vec.cost import flops\n    import numpy.linalg") == {"g5cp_vec", "numpy"}


@pytest.mark.parametrize(
    ("words", "ran"), [([], {"quick"}), (["-m", "slow"], {"slow"}), (["-m", "slow or not slow"], {"quick", "slow"})]
)
@pytest.mark.parametrize("folder", ["tests", "benchmarks"])
def test_slow_tests_run_when_asked_for_in_every_folder(tmp_path, folder, words, ran):
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / folder).mkdir()
    source = "import pytest\n\ndef test_quick():\n    pass\n\n@pytest.mark.slow\ndef test_slow():\n    pass\n"
    (tmp_path / folder / "test_it.py").write_text(source)
    command = [sys.executable, "-m", "pytest", folder, "-rA", "-p", "no:cacheprovider", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout
    passed = [line.split("::test_")[1] for line in done.stdout.splitlines() if line.startswith("PASSED")]
    assert set(passed) == ran
