"""The section that runs the odd shapes under compute-sanitizer's memory checker."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys

from benchmarks.machine import Setting
from benchmarks.recording import NotApplicable, Recorder

PLACES = ("/usr/local/cuda/bin/compute-sanitizer",)


def sanitizer(setting: Setting, record: Recorder) -> None:
    """memcheck over `benchmarks.odd_shapes`: no error, no wrong value."""
    if not setting.provider.is_cuda:
        raise NotApplicable("needs a GPU")
    tool = shutil.which("compute-sanitizer") or next(filter(os.path.exists, PLACES), None)
    if tool is None:
        raise NotApplicable("compute-sanitizer is not installed here")
    seconds = max(record.time_left() - 25, 10)  # the tool takes its time to start and to end
    log = setting.work / "sanitizer.log"
    command = [
        tool, "--tool", "memcheck", "--padding", "256", "--log-file", str(log),
        sys.executable, "-m", "benchmarks.odd_shapes", "--pack", str(setting.pack_path),
        "--device", str(setting.provider.ordinal), "--seconds", f"{seconds:.0f}",
    ]  # fmt: skip
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        printed, _ = process.communicate(timeout=max(record.time_left(), 20))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the tool and the program under it
        printed, _ = process.communicate()
    report = log.read_text() if log.exists() else ""
    covered = re.search(r"odd shapes: (\d+) of (\d+) kernels", printed)
    if covered is None:
        tail = "\n".join((printed + report).splitlines()[-15:])
        raise RuntimeError(
            f"the checked program did not come to its end (exit {process.returncode}): {tail}"
        )
    record.note("kernels covered", f"{covered[1]} of {covered[2]}")
    record.check("values under the checker", process.returncode == 0, printed.strip()[-200:])
    errors = re.search(r"ERROR SUMMARY: (\d+) error", report)
    found = errors[1] if errors else "no summary"
    record.check("memcheck errors", found == "0", found, 0, first=_first_errors(report))


def _first_errors(report: str) -> list[str]:
    """The lines that say what was wrong and in which kernel."""
    telling = [
        line
        for line in report.splitlines()
        if "Invalid" in line or " at " in line or "Device" in line
    ]
    return telling[:10]
