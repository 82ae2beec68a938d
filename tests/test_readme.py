"""README.md and the tree: the example runs, CI runs command two, links lead somewhere, files stay short."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_example_runs(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}  # the example chooses its own devices
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["(128, 16)", "(8, 16, 16)"]


@pytest.mark.parametrize("name", ["one", "two"])
def test_commands_name_files_and_extras_that_are_there(name):
    (command,) = re.findall(rf"<!-- command {name} -->\n```bash\n(.*?)```", README, re.DOTALL)
    extras = re.search(r'"\.\[(\w+)\]"', command)[1]
    assert re.search(rf"^{extras} = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    for path in re.findall(r" (examples/\S+|tests)\b", command):
        assert (ROOT / path).exists()
    assert f"command {name} -->" in (ROOT / ".ci" / "run").read_text() or name == "one"


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/*.md")) + sorted(ROOT.glob("*.md")), ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_files_stay_short():
    for folder, limit in (("jax_ep", 500), ("cuda", 500), ("tests", 500), ("examples", 500), ("cuda/kernels", 400)):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".cc", ".cu", ".cuh", ".h") and "third_party" not in path.parts:
                assert len(path.read_text().splitlines()) <= limit, f"{path.relative_to(ROOT)} is over {limit} lines"
