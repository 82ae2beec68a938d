"""tests/README.md: the tests that its table of cases names exist, and what tests say of cases is in the table."""

import ast
import pathlib
import re

HERE = pathlib.Path(__file__).parent


def rows() -> dict[str, list[str]]:
    """Cells of each case: the fault, tests on CPU, tests on a GPU, what is open."""
    lines = re.findall(r"^\| (B\d\d) \|(.*)\|$", (HERE / "README.md").read_text(), re.MULTILINE)
    return {case: [cell.strip() for cell in cells.split("|")] for case, cells in lines}


def functions() -> dict[str, dict[str, str]]:
    """Docstring of each function and class, by name, by stem of its file."""
    found = {}
    for path in HERE.rglob("*.py"):
        nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef | ast.ClassDef)]
        found[path.stem] = {n.name: ast.get_docstring(n) or "" for n in nodes}
    return found


def test_named_tests_exist():
    known = functions()
    everywhere = {name for names in known.values() for name in names}
    for case, (fault, on_cpu, on_gpu, _) in rows().items():
        assert fault and (on_cpu or on_gpu), case
        for name in re.findall(r"[\w:.]+", re.sub(r"\(.*?\)", "", f"{on_cpu} {on_gpu}")):
            file, _, test = name.partition("::")
            if test:
                assert test in known.get(file, {}), f"{case}: {name}"
            else:
                assert file.removesuffix(".py") in known or file in everywhere, f"{case}: {name}"


def test_files_have_names_of_their_own():
    """pytest imports test files by their bare names, so two of one name cannot be collected together."""
    names = [path.name for path in HERE.rglob("test_*.py")]
    assert len(set(names)) == len(names)


def test_cases_that_tests_name_are_in_the_table():
    table = rows()
    assert len(table) >= 43
    named = {
        case for names in functions().values() for text in names.values() for case in re.findall(r"\bB\d\d\b", text)
    }
    assert named <= set(table), named - set(table)
