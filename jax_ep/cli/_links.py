"""How the GPUs of a host are wired, as NVML tells it (package nvidia-ml-py)."""

from __future__ import annotations

from typing import Any

# By nvmlGpuTopologyLevel_t: what the PCIe path between two GPUs goes through.
_PCIE_PATHS = {
    0: "one board",
    10: "PCIe, one switch",
    20: "PCIe, several switches",
    30: "PCIe, one host bridge",
    40: "PCIe, one socket",
    50: "PCIe, across sockets",
}


def links(uuids: list[str]) -> dict[str, dict[str, str]]:
    """For each GPU of `uuids` the link to every other GPU that NVML shows on this host; {} where NVML is not there."""
    try:
        import pynvml as nvml
    except ImportError:
        return {}
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # the package without a driver
        return {}
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        gpus = {_text(nvml.nvmlDeviceGetUUID(handle)): handle for handle in handles}
        return {
            one: {other: _link(nvml, gpus[one], gpus[other]) for other in gpus if other != one}
            for one in uuids
            if one in gpus
        }
    except nvml.NVMLError:  # e.g. no permission in a container: the table says "-"
        return {}
    finally:
        nvml.nvmlShutdown()


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)  # old versions return bytes


def _link(nvml: Any, one: Any, other: Any) -> str:
    try:
        if nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK) == nvml.NVML_P2P_STATUS_OK:
            ends = _active_links(nvml, one)
            direct = ends.count(_text(nvml.nvmlDeviceGetPciInfo(other).busId))
            return f"NVLink x{direct or len(ends)}"  # none ends at the other GPU: all lead to a switch
    except nvml.NVMLError:  # GPUs without NVLink may refuse the question
        pass
    try:
        return _PCIE_PATHS.get(int(nvml.nvmlDeviceGetTopologyCommonAncestor(one, other)), "PCIe")
    except nvml.NVMLError:
        return "-"


def _active_links(nvml: Any, gpu: Any) -> list[str]:
    """PCI bus id at the far end of every active NVLink, "" where NVML keeps it to itself."""
    ends = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            if not nvml.nvmlDeviceGetNvLinkState(gpu, link):
                continue
        except nvml.NVMLError:  # this GPU has fewer links
            continue
        try:
            ends.append(_text(nvml.nvmlDeviceGetNvLinkRemotePciInfo(gpu, link).busId))
        except nvml.NVMLError:
            ends.append("")
    return ends
