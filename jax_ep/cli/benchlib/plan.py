"""What a run of the bench measures: made from the command line, handed to every rank as JSON."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from jax_ep.cli.benchlib.workloads import Workload


@dataclass(frozen=True)
class Plan:
    """Attributes are the options of `python -m jax_ep bench --help`."""

    workloads: tuple[Workload, ...]
    implementations: tuple[str, ...]  # (): all that the platform has
    layouts: tuple[str, ...]
    capacities: tuple[str, ...]
    modes: tuple[str, ...]
    num_sms: tuple[int, ...]  # (): by the model of tuning.py; several: a sweep, the model's choice among them
    ops: tuple[str, ...]  # of workloads.OPS
    num_calls: int
    repeats: int
    ranks_per_device: int | None  # None: ask the platform (one per GPU, all on the CPU)
    is_split: bool  # start and done, too
    is_recorded: bool | None  # Config.command_buffers
    is_host_timed: bool
    is_first_call: bool
    is_setup: bool  # what set-up takes in one fresh start
    ranks_per_node: tuple[int, ...]  # simulated nodes to measure beside one node; (): one node only
    transports: tuple[str, ...]  # Config.transport, between these nodes
    suffix: str  # to the implementations' names: what is special about these processes
    json_path: str | None
    png_path: str | None

    def nodes(self, num_ranks: int) -> list[tuple[int | None, str]]:
        """What to measure of `num_ranks` ranks: one node first, then (ranks per node, transport) of several.

        One transport after the other: one that fails takes nothing away from those before it.
        """
        several = [(n, how) for how in self.transports for n in self.ranks_per_node if n < num_ranks]
        return [(None, "auto"), *several]

    def to_json(self) -> str:
        """One word for a command line."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> Plan:
        """The inverse of `to_json`."""
        fields = json.loads(text)
        workloads = tuple(Workload(**w) for w in fields.pop("workloads"))
        lists = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
        return Plan(workloads=workloads, **lists)
