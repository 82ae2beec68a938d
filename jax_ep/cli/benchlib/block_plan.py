"""What a run of W8 measures: a layer of `jax_ep.nn`, made from the command line, handed to every rank as JSON.

Apart from `block`, because that needs Flax and the rest of the bench does not.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from dataclasses import dataclass

LAYOUTS = ("expert", "batched")
_OURS = ("cuda", "xla")
# Options of the other workloads alone.
_NOT_FOR_BLOCKS = (
    *("first_call", "setup", "routing", "sent", "op", "mode", "split", "ranks_per_node", "transport"),
    *("command_buffers", "host"),
)


@dataclass(frozen=True)
class Block:
    """One layer and its tokens."""

    name: str
    total_tokens: int  # over all ranks
    hidden: int = 2048
    ffn: int = 768
    num_topk: int = 2
    num_experts: int = 128
    dtype: str = "bfloat16"


BLOCKS = {b.name: b for b in (Block("W8", 32768),)}


@dataclass(frozen=True)
class BlockPlan:
    """Attributes are the options of `python -m jax_ep bench --help`."""

    block: Block
    num_tokens: int | None  # per rank; None: the block's, spread over the ranks
    implementations: tuple[str, ...]  # (): all that the platform has
    layouts: tuple[str, ...]
    capacities: tuple[str, ...]
    num_sms: int | None
    num_calls: int
    repeats: int
    json_path: str | None
    png_path: str | None

    def to_json(self) -> str:
        """One word for a command line."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> BlockPlan:
        """The inverse of `to_json`."""
        fields = json.loads(text)
        block = Block(**fields.pop("block"))
        return BlockPlan(block=block, **{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})


def plan(parser: argparse.ArgumentParser, args: argparse.Namespace) -> BlockPlan:
    """The plan that options of the bench stand for; those that do not fit end the command."""
    name = args.workload[0]
    several = [option for option in ("workload", "ranks", "tokens", "num_sms") if len(getattr(args, option) or ()) > 1]
    others = [option for option in _NOT_FOR_BLOCKS if getattr(args, option) != parser.get_default(option)]
    if several or others:
        spelt = ", ".join("--" + option.replace("_", "-") for option in several + others)
        parser.error(f"{', '.join(BLOCKS)}: got {spelt}, expected at most one of each of its own options")
    if set(args.implementation) - set(_OURS):
        parser.error(f"{name}: --implementation is {' or '.join(_OURS)}")
    block = BLOCKS[name]
    names = ("hidden", "ffn", "num_topk", "num_experts", "dtype")
    changes = {name: value for name in names if (value := getattr(args, name)) is not None}
    if changes or args.tokens:
        block = dataclasses.replace(block, name="custom", **changes)
    return BlockPlan(
        block=block,
        num_tokens=args.tokens[0] if args.tokens else None,
        implementations=args.implementation,
        layouts=args.layout or LAYOUTS,
        capacities=args.capacity,
        num_sms=args.num_sms[0] if args.num_sms else None,
        num_calls=args.calls or (6 if args.quick else 10),
        repeats=args.repeats or (5 if args.quick else 15),
        json_path=args.json,
        png_path=args.png,
    )
