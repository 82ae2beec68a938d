"""`python -m jax_ep doctor`: what is installed, which devices are there, and whether the CUDA path can be used.

Ends with status 0 when the installation is consistent, with a GPU or without, and with 1 when something is broken.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import pathlib
import platform
import shutil
import sys
from importlib.machinery import EXTENSION_SUFFIXES

import jax
import jaxlib

import jax_ep
from jax_ep import _ffi, group, nvshmem
from jax_ep.cli import launch, mps

PACKAGES = (
    "flax",
    "optax",
    "orbax-checkpoint",
    "tokamax",
    "matplotlib",
    "rich",
    "nvidia-ml-py",
    "nvidia-nvshmem-cu12",
    "nvidia-nvshmem-cu13",
)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def report() -> tuple[list[tuple[str, str]], list[str]]:
    """(what, value) lines, and what is broken."""
    problems = []
    here = pathlib.Path(jax_ep.__file__).parent
    lines = [
        ("jax_ep", f"{jax_ep.__version__} in {here}"),
        ("python", f"{platform.python_version()} on {platform.platform()}"),
        ("jax, jaxlib", f"{jax.__version__}, {jaxlib.__version__}"),
        ("optional packages", ", ".join(f"{p} {v}" for p in PACKAGES if (v := _version(p))) or "none"),
    ]
    if _version("nvidia-nvshmem-cu12") and _version("nvidia-nvshmem-cu13"):
        problems.append("nvidia-nvshmem-cu12 and -cu13 install the same files: keep the one of your CUDA version")

    runtime = _ffi.runtime_api_version()
    lines.append(("XLA FFI API", ".".join(map(str, runtime)) if runtime else "unknown (no header in jaxlib)"))
    missing = _ffi.available()
    if missing:
        lines.append(("CUDA extension", missing))
        elsewhere = _other_installation(here)
        if elsewhere:
            problems.append(
                f"this run imports jax_ep from {here}, another one with the extension is installed in {elsewhere}: "
                "run outside the checkout, or with python -P"
            )
        elif any((here / f"_cuda{suffix}").exists() for suffix in EXTENSION_SUFFIXES):
            problems.append("the CUDA extension is there but does not load")
    else:
        module = _ffi.module()
        built = ".".join(map(str, module.ffi_api_version))
        lines.append(("CUDA extension", f"CUDA {module.cuda_major}, FFI API {built}, protocol {module.protocol}"))
        lines.append(("groups over hosts", nvshmem.problem(2) or "NVSHMEM"))

    num_gpus = launch.num_gpus()
    lines.append(("GPUs (driver)", str(num_gpus)))
    if num_gpus:
        lines.append(("MPS", shutil.which(mps.CONTROL) or "not installed: ranks that share a GPU are time-sliced"))
    lines += _devices(problems)
    return lines, problems


def _other_installation(here: pathlib.Path) -> pathlib.Path | None:
    for folder in map(pathlib.Path, sys.path):
        other = (folder / "jax_ep").resolve()
        if other != here.resolve() and any((other / f"_cuda{suffix}").exists() for suffix in EXTENSION_SUFFIXES):
            return other
    return None


def _devices(problems: list[str]) -> list[tuple[str, str]]:
    """JAX's devices; why the CUDA path cannot serve a group of all local ones, if so."""
    try:
        devices = jax.local_devices()
    except RuntimeError as error:  # JAX's own message says which backend and why
        problems.append(f"JAX has no backend: {error}")
        return []
    lines = [("JAX devices", ", ".join(f"{d.device_kind} ({d.platform}:{group.member(d)[1]})" for d in devices))]
    if _ffi.available() or devices[0].platform != "gpu":
        lines.append(("implementation", "xla (pure JAX)"))
        return lines
    for device in devices:
        info = _ffi.module().device_info(device.local_hardware_id)
        major, minor = info["compute_capability"]
        lines.append((f"GPU {device.local_hardware_id}", f"{info['name']}, sm_{major}{minor}, {info['num_sms']} SMs"))
    from jax_ep import bootstrap

    reason = bootstrap.can_use_cuda(((*(group.member(d) for d in devices),),))
    lines.append(("implementation", "cuda" if not reason else f"xla (pure JAX): {reason}"))
    return lines


def main(argv: list[str]) -> int:
    """The command."""
    argparse.ArgumentParser(prog="python -m jax_ep doctor", description=__doc__.splitlines()[0]).parse_args(argv)
    lines, problems = report()
    for what, value in lines:
        print(f"{what:<20}{value}")
    for problem in problems:
        print(f"\nPROBLEM: {problem}")
    return 1 if problems else 0
