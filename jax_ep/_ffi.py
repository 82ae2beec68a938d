"""The only importer of the compiled extension ``jax_ep._cuda``.

Importing this module registers the FFI targets for CUDA. It starts no backend, needs no GPU, and never raises:
`available` says why the extension cannot be used.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Sequence
from types import ModuleType

import jax

_REBUILD = (
    "rebuild it against the installed jaxlib: pip install --force-reinstall --no-deps --no-build-isolation "
    "<source of jax_ep>"
)


def runtime_api_version() -> tuple[int, int] | None:
    """XLA's FFI API version in the installed jaxlib, from the header that it ships (None: no header)."""
    try:
        path = os.path.join(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h")
        with open(path, encoding="utf-8") as header:
            text = header.read()
    except OSError:
        return None
    found = [re.search(rf"^#define XLA_FFI_API_{part} (\d+)", text, re.MULTILINE) for part in ("MAJOR", "MINOR")]
    if not all(found):
        return None
    major, minor = (int(match.group(1)) for match in found if match)
    return major, minor


def version_problem(built: tuple[int, int], runtime: tuple[int, int] | None) -> str:
    """Why handlers of API version `built` cannot run in `runtime`; "" if they can.

    XLA refuses a handler that is newer than itself, and JAX then loses its whole GPU backend: so this is checked
    before anything is registered.
    """
    if runtime is None or (built[0] == runtime[0] and built[1] <= runtime[1]):
        return ""
    return (
        f"the extension jax_ep._cuda was built for XLA FFI API {built[0]}.{built[1]}, the installed jaxlib has "
        f"{runtime[0]}.{runtime[1]}; {_REBUILD}"
    )


def _load() -> tuple[ModuleType | None, str]:
    """The extension with its targets registered, or the reason why not."""
    try:
        module = importlib.import_module("jax_ep._cuda")
    except ModuleNotFoundError:
        return None, "the CUDA extension is not built (install jax_ep where nvcc is found, or with JAX_EP_CUDA=on)"
    except ImportError as error:  # built, but for another Python, or with a missing library
        return None, f"the CUDA extension does not load ({error}); {_REBUILD}"
    problem = version_problem(module.ffi_api_version, runtime_api_version())
    if problem:
        return None, problem
    try:
        for name, stages in module.targets().items():
            jax.ffi.register_ffi_target(name, stages, platform="CUDA")
    except Exception as error:  # for instance a plugin of another version: told by available(), not by import
        return None, f"JAX does not accept the CUDA extension's FFI targets ({error}); {_REBUILD}"
    return module, ""


_module, _reason = _load()


def available() -> str:
    """Empty when the extension is loaded and its targets are registered, else the reason."""
    return _reason


def module() -> ModuleType:
    """The extension. Raises ``SetupError`` with the reason when it is not available."""
    if _module is None:
        from jax_ep.errors import SetupError

        raise SetupError(_reason)
    return _module


def cuda_major() -> int:
    """Of the CUDA that the extension was built with, 13 for 13.0; 0 without the extension."""
    return _module.cuda_major if _module is not None else 0


def protocol() -> int:
    """Version of what ranks say to each other; 0 without the extension."""
    return _module.protocol if _module is not None else 0


def num_devices() -> int:
    """CUDA devices that this process sees; 0 without the extension, a driver or a GPU."""
    return _module.num_devices() if _module is not None else 0


def has_machine_code(capability: tuple[int, int], built: Sequence[int]) -> bool:
    """Whether code built for the architectures `built` (90 for 9.0) runs on a device without translation from PTX."""
    major, minor = capability
    return any(arch // 10 == major and arch % 10 <= minor for arch in built)


def arena_shape(
    num_ranks: int, num_experts: int, row_bytes: int, num_topk: int, staging_bytes: int
) -> tuple[int, int, int, int]:
    """``(count_words, staging_bytes, 0, 1)``: the size class of symmetric memory that serves such a call."""
    return module().arena_shape(num_ranks, num_experts, row_bytes, num_topk, staging_bytes)


def latency_arena_shape(
    num_ranks: int, num_nodes: int, num_experts: int, row_bytes: int, num_topk: int, num_tokens: int, num_slots: int
) -> tuple[int, int, int, int]:
    """``(count_words, staging_bytes, num_slots, num_nodes)``: for `num_slots` calls of latency mode at a time."""
    return module().latency_arena_shape(num_ranks, num_nodes, num_experts, row_bytes, num_topk, num_tokens, num_slots)


def node_arena_shape(
    num_ranks: int, num_nodes: int, num_experts: int, row_bytes: int, num_topk: int, node_bytes: int
) -> tuple[int, int, int, int]:
    """``(count_words, staging_bytes, 0, num_nodes)``: likewise, for calls over several nodes."""
    return module().node_arena_shape(num_ranks, num_nodes, num_experts, row_bytes, num_topk, node_bytes)
