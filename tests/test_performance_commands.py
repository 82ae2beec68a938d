"""docs/performance.md: commands that take its figures are understood by what they start. Nothing is measured here."""

import pathlib
import re
import shlex

from jax_ep.cli import bench, launch

ROOT = pathlib.Path(__file__).parent.parent


def commands(heading: str = "") -> list[list[str]]:
    """Words after `python`, of each indented command from a heading on; with and without what is in brackets."""
    text = re.sub(r"\\\n\s+", "", (ROOT / "docs" / "performance.md").read_text())
    text = text[text.index(heading) :]
    lines = re.findall(r"^ {4}python (.*)$", text, re.MULTILINE)
    forms = [
        form for line in lines for form in dict.fromkeys((re.sub(r"\[.*?\]", "", line), re.sub(r"[][]", "", line)))
    ]
    return [shlex.split(re.sub(r"--ranks R\b", "--ranks 8", form), comments=True) for form in forms]


def test_commands_of_the_bench(monkeypatch):
    """Each begins what it is for, so its options go together."""
    begun = []
    for name in ("_tables", "_setups", "_first_calls", "_block"):
        monkeypatch.setattr(bench, name, lambda *a, name=name: begun.append(name) or 0)
    monkeypatch.setattr(launch, "num_gpus", lambda: 1)
    words = [command[3:] for command in commands() if command[:3] == ["-m", "jax_ep", "bench"]]
    assert len(words) >= 8
    assert [bench.main(w) for w in words] == [0] * len(words)
    assert len(begun) == len(words) and set(begun) == {"_tables", "_setups", "_first_calls", "_block"}
    # What nobody has measured yet ends by itself, whatever hangs; --timeout is of one start.
    later = commands("## Not measured yet")
    started = [words for words in later if words[:3] in (["-m", "jax_ep", "bench"], ["-m", "jax_ep", "launch"])]
    assert len(started) >= 5 and all("--timeout" in words for words in started)


def test_other_commands(gpu_scripts, monkeypatch):
    """Scripts that exist, stages that are there, options that their parsers know."""
    (run,) = gpu_scripts("run")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import decode
    import train_moe

    parsers = {"decode.py": decode.parse_args, "train_moe.py": train_moe.parse_args}
    stages, seen = run.stages("cache"), []
    for words in commands():
        scripts = [i for i, word in enumerate(words) if word.endswith(".py")]
        for at in scripts[:1]:
            path, options = ROOT / words[at], words[at + 1 :]
            assert path.is_file(), path
            seen.append(path.name)
            if path.name in parsers:
                parsers[path.name](options)
            if path.name == "run.py":
                assert run.chosen(stages, [options[options.index("--only") + 1]]), options
    assert {"train_moe.py", "decode.py", "run.py", "several.py", "sanitize.py"} <= set(seen)
