"""Byte-level text that is on every machine: the sources of Python's standard library."""

import pathlib
import sysconfig

import numpy as np

VOCABULARY = 256
# Tests and vendored or generated tables are left out: they are large and unlike the rest.
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "encodings", "__pycache__"}


def load_corpus() -> np.ndarray:
    """All sources as one array of bytes, in the order of their paths, so equal in every process of a machine."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    paths = [p for p in root.rglob("*.py") if not SKIPPED & set(p.relative_to(root).parts[:-1])]
    text = b"\n\n".join(p.read_bytes() for p in sorted(paths))
    if not text:
        raise FileNotFoundError(f"no Python sources under {root}; this example trains on the standard library")
    return np.frombuffer(text, np.uint8)


def unigram_entropy(corpus: np.ndarray) -> float:
    """Nats per byte of a model that knows only how often each byte occurs."""
    share = np.bincount(corpus, minlength=VOCABULARY) / corpus.size
    share = share[share > 0]
    return float(-np.sum(share * np.log(share)))


def batch_at(corpus: np.ndarray, step: int, batch: int, length: int, seed: int, rows=slice(None)) -> np.ndarray:
    """Sequences `rows` of the global batch of a step, [len(rows), length + 1] i32; default: all of it.

    A function of step and seed only, so that a restored run and a run on other devices see the same text.
    """
    rng = np.random.default_rng((seed, step))
    starts = rng.integers(0, corpus.size - length, batch)[rows]
    return corpus[starts[:, None] + np.arange(length + 1)].astype(np.int32)
