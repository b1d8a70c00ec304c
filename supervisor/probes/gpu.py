"""GPUs as NVML sees them: all there, none lost, none that wants a reset, a reboot or the vendor.

NVML calls can hang for ever after some faults; the runner gives this probe a process and a deadline of its own.
"No data" (not supported on this model or driver) is never a failure.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainer.contract import CheckResult

RECOVERY_ACTIONS = {
    1: "a GPU reset",
    2: "a node reboot",
    3: "a drain of its peer traffic",
    4: "a drain and a reset",
    5: "recovery of its IMEX domain",
    6: "a bus reset",
    7: "a system reboot",
}

# NVML return codes that say something about the node; the rest is "could not tell"
_FAULTS = {
    9: "the driver is not loaded",
    12: "there is no driver library",
    15: "the GPU is lost",
    16: "the GPU needs a reset",
    18: "driver library and kernel module are of different versions",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU. None: no data."""

    index: int
    bus_id: str = ""
    error_code: int = 0  # NVML's return code when the GPU itself can't be asked
    recovery_action: int | None = None
    has_remap_failure: bool | None = None
    has_pending_remap: bool | None = None
    uncorrected_errors: int | None = None  # since the driver was loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """All GPUs of the node, or the reason why there is no reading."""

    gpus: tuple[Gpu, ...] = ()
    error_code: int = 0  # NVML's return code when nothing could be asked
    error: str = ""


def measure() -> GpuReading:
    """Ask NVML once; never raises for what NVML says."""
    try:
        pynvml: Any = importlib.import_module("pynvml")  # its annotations are none
    except ImportError as error:
        return GpuReading(error=f"no NVML binding: {error}")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return GpuReading(error_code=int(error.value), error=str(error))
    try:
        count = int(pynvml.nvmlDeviceGetCount())
        return GpuReading(gpus=tuple(_measure_one(pynvml, index) for index in range(count)))
    except pynvml.NVMLError as error:
        return GpuReading(error_code=int(error.value), error=str(error))
    finally:
        pynvml.nvmlShutdown()


def _measure_one(nvml: Any, index: int) -> Gpu:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        bus_id = _text(nvml.nvmlDeviceGetPciInfo(handle).busId)
    except nvml.NVMLError as error:
        return Gpu(index=index, error_code=int(error.value))
    remapped = _ask(nvml, lambda: nvml.nvmlDeviceGetRemappedRows(handle))
    errors = _ask(
        nvml,
        lambda: nvml.nvmlDeviceGetTotalEccErrors(
            handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
    )
    return Gpu(
        index=index,
        bus_id=bus_id,
        recovery_action=_recovery_action(nvml, handle),
        has_pending_remap=None if remapped is None else bool(remapped[2]),
        has_remap_failure=None if remapped is None else bool(remapped[3]),
        uncorrected_errors=None if errors is None else int(errors),
    )


def _recovery_action(nvml: Any, handle: Any) -> int | None:
    field_id = getattr(nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", 230)
    fields = _ask(nvml, lambda: nvml.nvmlDeviceGetFieldValues(handle, [field_id]))
    # the call succeeds as a whole; each entry has a return code of its own
    if not fields or int(fields[0].nvmlReturn) != 0:
        return None
    return int(fields[0].value.uiVal)


def _ask(nvml: Any, question: Callable[[], Any]) -> Any:
    try:
        return question()
    except nvml.NVMLError:
        return None


def _text(value: str | bytes) -> str:
    return value.decode("ascii", "replace") if isinstance(value, bytes) else value


def judge(reading: GpuReading, *, expected_count: int) -> tuple[CheckResult, ...]:
    """One result for the count, and one for each GPU that says that it is broken."""
    if reading.error:
        fault = _FAULTS.get(reading.error_code)
        return (CheckResult(check="gpu", ok=False if fault else None, detail=fault or reading.error),)
    count = len(reading.gpus)
    ok = count >= expected_count
    detail = "" if ok else f"{count} of {expected_count} GPUs are there"
    whole = CheckResult(check="gpu", ok=ok, detail=detail, value=float(count), limit=float(expected_count))
    return (whole, *(_judge_one(gpu) for gpu in reading.gpus))


def _judge_one(gpu: Gpu) -> CheckResult:
    check, name = f"gpu:{gpu.index}", f"GPU {gpu.index} {gpu.bus_id}".strip()
    if gpu.error_code:
        fault = _FAULTS.get(gpu.error_code)
        detail = f"{name}: {fault or f'NVML error {gpu.error_code}'}"
        return CheckResult(check=check, ok=False if fault else None, detail=detail)
    if gpu.recovery_action:
        wanted = RECOVERY_ACTIONS.get(gpu.recovery_action, f"recovery action {gpu.recovery_action}")
        return CheckResult(check=check, ok=False, detail=f"{name} wants {wanted}", value=float(gpu.recovery_action))
    if gpu.has_remap_failure:
        return CheckResult(check=check, ok=False, detail=f"{name}: remapping a memory row failed")
    # a pending remap is no outage, and contained memory errors killed one process, not the GPU: said, not condemned
    notes = ["a row remap is pending"] if gpu.has_pending_remap else []
    if gpu.uncorrected_errors:
        notes.append(f"{gpu.uncorrected_errors} uncorrected memory errors since the driver was loaded")
    return CheckResult(check=check, ok=True, detail=f"{name}: {', '.join(notes)}" if notes else "")
