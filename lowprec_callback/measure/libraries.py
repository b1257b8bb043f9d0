"""Which cuDNN and cuBLASLt are really loaded, and which cuDNN Transformer Engine (TE) would take.

It matters because two cuDNNs often live on one machine: torch ships its own, and TE looks in the system's
folders first. When TE finds an older one there, it leaves attention unfused and says so nowhere.
"""

from __future__ import annotations

import ctypes
import glob
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MAPS = Path("/proc/self/maps")
_CUDNN = "libcudnn.so"


def loaded_libraries(stem: str, maps: Path = MAPS) -> list[Path]:
    """All `lib<stem>.so*` that this process has loaded, in order of address; none where there is no /proc."""
    try:
        lines = maps.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    name = re.compile(rf"lib{re.escape(stem)}\.so(\.[\d.]+)?")
    # A line: address range, permissions, offset, device, inode, path (which may hold spaces).
    paths = (Path(fields[5]) for line in lines if len(fields := line.split(maxsplit=5)) == 6)
    return list(dict.fromkeys(path for path in paths if name.fullmatch(path.name)))


def loaded_library(stem: str, maps: Path = MAPS) -> Path | None:
    """The first of them: `loaded_library("cublasLt")` is the file to open for cuBLASLt's own logger."""
    found = loaded_libraries(stem, maps)
    return found[0] if found else None


@dataclass(frozen=True)
class Candidate:
    """A library file, and the rule that leads to it."""

    path: Path
    found_by: str


def te_cudnn_candidate(environ: Mapping[str, str] = os.environ) -> Candidate | None:
    """The cuDNN that `import transformer_engine` loads, found without loading anything.

    TE 2.20.2, `transformer_engine/common/__init__.py`, asks in this order:
    1. lines 390-405, `_load_cuda_library_from_system`: the folders CUDNN_HOME, CUDNN_PATH, CUDA_HOME,
       CUDA_PATH, /usr/local/cuda; in the first that holds `**/libcudnn.so*`, the last file name in
       alphabetical order (so `libcudnn.so.9.9.0` wins over `libcudnn.so.9.14.0`);
    2. lines 407-412: `libcudnn.so`, without a version, by the system's loader: LD_LIBRARY_PATH, the loader's
       cache, the default folders;
    3. lines 338-378, `_load_cuda_library_from_python`: the wheels under `site-packages/nvidia`. This is the
       one that torch ships.

    Loaded with RTLD_GLOBAL, it is the one whose functions TE calls, also when torch has brought its own. TE
    refuses it only if it is older than 9.12 (lines 24 and 35-44).
    """
    for variable in ("CUDNN_HOME", "CUDNN_PATH", "CUDA_HOME", "CUDA_PATH", None):
        folder = environ.get(variable) if variable else "/usr/local/cuda"
        if not folder:
            continue
        files = [file for file in glob.glob(f"{folder}/**/{_CUDNN}*", recursive=True) if "stub" not in file]
        if files:
            return Candidate(Path(max(files, key=os.path.basename)), variable or folder)
    by_loader = _by_system_loader(environ)
    if by_loader is not None:
        return Candidate(by_loader, "the system's loader")
    shipped = torch_cudnn_file()
    return Candidate(shipped, "Python wheels") if shipped else None


def _by_system_loader(environ: Mapping[str, str]) -> Path | None:
    """What dlopen("libcudnn.so") would open: LD_LIBRARY_PATH, ld.so's cache, the default folders."""
    for folder in environ.get("LD_LIBRARY_PATH", "").split(":"):
        if folder and (Path(folder) / _CUDNN).exists():
            return Path(folder) / _CUDNN
    for line in _loader_cache().splitlines():
        name, _, path = line.partition(" => ")
        if name.split() and name.split()[0] == _CUDNN:
            return Path(path.strip())
    for folder in ("/lib64", "/usr/lib64", "/lib", "/usr/lib"):
        if (Path(folder) / _CUDNN).exists():
            return Path(folder) / _CUDNN
    return None


def _loader_cache() -> str:
    """The text of `ldconfig -p`; empty where there is none."""
    program = shutil.which("ldconfig", path=f"{os.environ.get('PATH', os.defpath)}:/sbin:/usr/sbin")
    if program is None:
        return ""
    try:
        return subprocess.run([program, "-p"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def torch_cudnn_file() -> Path | None:
    """The cuDNN that a torch from a wheel ships: `nvidia/cudnn/lib/libcudnn.so.9` beside torch."""
    spec = importlib.util.find_spec("torch")
    sites = [Path(spec.origin).parents[1]] if spec and spec.origin else []
    for site in (*sites, Path(sysconfig.get_path("purelib"))):
        for layout in ("cu13/cudnn/lib", "cu13/lib", "cudnn/lib", "cuda_cudnn/lib"):
            files = sorted((site / "nvidia" / layout).glob(f"{_CUDNN}.*"))
            if files:
                return files[-1]
    return None


def cudnn_version(file: Path) -> str | None:
    """A cuDNN file's version, e.g. "9.19.0": from its name, else by asking it, in a process of its own.

    Loading a second cuDNN into this process could change which one answers torch's calls.
    """
    named = re.search(r"\.so\.(\d+\.\d+\.\d+)$", str(file.resolve()))
    if named:
        return named.group(1)
    code = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).cudnnGetVersion())"
    try:
        answer = subprocess.run(
            [sys.executable, "-c", code, str(file)], capture_output=True, text=True, timeout=30, check=False
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return decode_cudnn_version(int(answer)) if answer.isdigit() else None


def decode_cudnn_version(number: int) -> str:
    """cudnnGetVersion's number as text: 91400 is 9.14.0, 8902 is 8.9.2."""
    major, rest = divmod(number, 10000 if number >= 90000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def cublaslt_version(file: Path) -> str | None:
    """Version of the cuBLASLt that is loaded from `file`: 130200 is 13.2.0."""
    try:
        ask = ctypes.CDLL(str(file)).cublasLtGetVersion
        ask.restype = ctypes.c_size_t
        number = int(ask())
    except (OSError, AttributeError):
        return None
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
