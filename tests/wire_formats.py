"""What rows lose in narrow formats on their way back: `python tests/wire_formats.py` (no test, no device, ten seconds).

A token's result is the sum of what its ranks send, each rank's sum rounded to bfloat16 first. Here these sums come from
experts of a gated MLP, cross in each format, and are added in float64; the error is that of the whole way against
float64. Rows "plain" are those of random matrices. Rows "outliers" have what trained models show: heavy-tailed inputs,
channels of very different size at every place, few of which tower over the others, and inner channels that explode.

Formats: bfloat16; FP8 as `combine(quantize="fp8_wire")` sends it; and a sign with a logarithm in steps, of 10 or 8
bits together. Steps of the logarithm are those of a block of 128: from its smallest to its largest magnitude, both of
which travel with it, but not below `LOG_REACH` octaves under the largest.
"""

import ml_dtypes
import numpy as np

from jax_ep import testing

BLOCK = 128
LOG_REACH = 32  # octaves
NUM_TOKENS, HIDDEN, FFN, NUM_EXPERTS, NUM_TOPK, NUM_RANKS = 256, 1024, 512, 32, 8, 8


def through_bfloat16(rows: np.ndarray) -> np.ndarray:
    return rows.astype(ml_dtypes.bfloat16).astype(np.float64)


def through_fp8(rows: np.ndarray) -> np.ndarray:
    return testing.oracle_dequantize(*testing.oracle_quantize(rows)).astype(np.float64)


def log_step(rows: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """log2 of the smallest magnitude but 0 that a block can say, and the step between two; [..., blocks, 1]."""
    size = np.abs(rows.astype(np.float64)).reshape(*rows.shape[:-1], -1, BLOCK)
    with np.errstate(divide="ignore"):
        log = np.log2(size)
    top = log.max(-1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0)  # zeros only
    low = np.where(np.isfinite(log), log, top).min(-1, keepdims=True)
    low = np.maximum(low, top - LOG_REACH)
    return low, (top - low) / (2 ** (bits - 1) - 2)  # one code is 0


def through_log(rows: np.ndarray, bits: int) -> np.ndarray:
    """To the nearest value, not the nearest logarithm."""
    blocks = rows.astype(np.float64).reshape(*rows.shape[:-1], -1, BLOCK)
    size = np.abs(blocks)
    low, step = log_step(rows, bits)
    with np.errstate(divide="ignore", invalid="ignore"):
        below = np.floor((np.log2(size) - low) / step)
    below = np.clip(np.nan_to_num(below), 0, 2 ** (bits - 1) - 3)
    lower, upper = 2 ** (low + below * step), 2 ** (low + (below + 1) * step)
    value = np.where(size > (lower + upper) / 2, upper, lower)
    value = np.where(size < 2**low / 2, 0, value)
    return (np.sign(blocks) * value).reshape(rows.shape)


# Bits of a value, with its share of what travels per block.
FORMATS = {
    "bfloat16": (16, through_bfloat16),
    "fp8": (8 + 32 / BLOCK, through_fp8),
    "log, 10 bits": (10 + 64 / BLOCK, lambda rows: through_log(rows, 10)),
    "log, 8 bits": (8 + 64 / BLOCK, lambda rows: through_log(rows, 8)),
}


def rank_sums(kind: str, seed: int = 0) -> np.ndarray:
    """Weighted sums of the experts of each rank, [rank, token, hidden] float64, 0 where a token has none there."""
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal
    gate, up = (normal((NUM_EXPERTS, HIDDEN, FFN)) / HIDDEN**0.5 for _ in range(2))
    down = normal((NUM_EXPERTS, FFN, HIDDEN)) / FFN**0.5
    if kind == "plain":
        x = normal((NUM_TOKENS, HIDDEN))
    else:
        uneven = lambda size, sigma: np.exp(sigma * normal(size))
        few = lambda size, count: rng.choice(size, count, replace=False)
        x = rng.standard_t(4, (NUM_TOKENS, HIDDEN)) * uneven(HIDDEN, 0.7)
        x[:, few(HIDDEN, 8)] *= 20
        gate *= uneven((NUM_EXPERTS, 1, FFN), 0.7)
        up *= uneven((NUM_EXPERTS, 1, FFN), 0.7)
        inner = few(FFN, 4)
        gate[:, :, inner] *= 8
        up[:, :, inner] *= 8
        down *= uneven(HIDDEN, 1.0)
        down[:, :, few(HIDDEN, 8)] *= 30
    x /= np.sqrt((x**2).mean(-1, keepdims=True))
    topk_idx = np.argsort(rng.random((NUM_TOKENS, NUM_EXPERTS)), axis=-1)[:, :NUM_TOPK]
    weights = np.exp(normal((NUM_TOKENS, NUM_TOPK)))
    weights /= weights.sum(-1, keepdims=True)
    sums = np.zeros((NUM_RANKS, NUM_TOKENS, HIDDEN))
    for expert in range(NUM_EXPERTS):
        token, k = np.nonzero(topk_idx == expert)
        gated = x[token] @ gate[expert]
        y = (gated / (1 + np.exp(-gated)) * (x[token] @ up[expert])) @ down[expert]
        np.add.at(sums[expert // (NUM_EXPERTS // NUM_RANKS)], token, weights[token, k, None] * through_bfloat16(y))
    return sums


def errors(kind: str) -> dict[str, tuple[float, float, float]]:
    """By format: error over token (norms), median and largest; error of a value over what its ranks send, largest."""
    sums = rank_sums(kind)
    exact, size = sums.sum(0), np.abs(sums).sum(0)
    found = {}
    for name, (_, through) in FORMATS.items():
        error = sum(through(rows.astype(ml_dtypes.bfloat16)) for rows in sums) - exact
        of_token = np.linalg.norm(error, axis=-1) / np.linalg.norm(exact, axis=-1)
        found[name] = float(np.median(of_token)), float(of_token.max()), float((np.abs(error) / size).max())
    return found


def main():
    print(f"{'rows':<10}{'format':<14}{'bits a value':>12}{'token, median':>15}{'worst':>9}{'value, worst':>14}")
    for kind in ("plain", "outliers"):
        for name, figures in errors(kind).items():
            columns = "".join(f"{100 * f:>{width}.2f}%" for f, width in zip(figures, (14, 8, 13), strict=True))
            print(f"{kind:<10}{name:<14}{FORMATS[name][0]:>12.2f}{columns}")


if __name__ == "__main__":
    main()
