#!/usr/bin/env python3
"""The two commands of this repository. They need Python 3.11 or newer, and nothing else.

    python3 try.py [arguments of examples/mini_gpt/train.py]   install, then profile MiniGPT
    python3 try.py test [arguments of pytest]                  install, then lint, type-check and test

Everything is installed into `.venv` beside this file, or into the folder that LOWPREC_VENV names. Where there is
an NVIDIA GPU, the PyTorch and the Transformer Engine (TE) that the Python running this file can import are used;
a missing TE is installed, and if that cannot work, plain PyTorch is used and you are told.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import site
import subprocess
import sys
import time
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).resolve().parent
STAMP = "made-by-try.json"
"""Inside the environment: what it was made for. A folder without it is not ours and is left alone."""

PROBE = """
import json
found = {"cuda": False, "te": False, "why": ""}
try:
    import torch
    if not torch.cuda.is_available():
        raise RuntimeError("torch " + torch.__version__ + " finds no CUDA device")
    found["cuda"] = True
    import transformer_engine.pytorch
    found["te"] = True
except BaseException as error:
    found["why"] = type(error).__name__ + ": " + str(error)
print()
print(json.dumps(found))
"""
"""Run by a Python, to see what it can import."""

MISSING = """
import importlib.metadata, sys
from pip._vendor.packaging.requirements import Requirement
def met(text):
    need = Requirement(text)
    try:
        return need.specifier.contains(importlib.metadata.version(need.name), prereleases=True)
    except importlib.metadata.PackageNotFoundError:
        return False
for text in sys.argv[1:]:
    if not met(text):
        print(text)
"""
"""Run by the environment's Python with requirements as arguments: prints those that are not met."""

TE_ADVICE = """\
[try] Transformer Engine cannot be used, so plain PyTorch is: no FP8. It is built from source against the installed
      PyTorch, which needs
        - a CUDA toolkit with nvcc, of the CUDA version that PyTorch was built for (CUDA_HOME names it),
        - the headers of cuDNN (CUDNN_PATH names the folder above include/),
        - a C++17 compiler.
      NVIDIA's PyTorch container has all that, and Transformer Engine: run this command inside it. To try again
      here, delete {folder} first.
      Importing it says: {why}
      What pip said is in {log}"""


TE_FILES = "transformer-engine==2.20.2"
"""The version whose files the recipe cards cite. Without its dependencies it brings Python files and nothing to run."""


class Failure(Exception):
    """Something that stops the command; the text says what, and what to do."""


def say(text: str) -> None:
    """A line of progress."""
    print(f"[try] {text}", flush=True)


@contextmanager
def step(what: str) -> Iterator[None]:
    """Say what is being done, and afterwards how long it took."""
    say(f"{what} ...")
    began = time.monotonic()
    yield
    say(f"  {time.monotonic() - began:.0f} s")


def run(*command: object, **options: Any) -> int:
    """Run to the end. Ctrl-C reaches the command as well; it may end in its own way before this does."""
    process = subprocess.Popen([str(part) for part in command], **options)
    interrupted = False
    while True:
        try:
            code: int = process.wait()
        except KeyboardInterrupt:
            interrupted = True
        else:
            break
    if interrupted:
        raise KeyboardInterrupt
    return code


def ask(*command: object) -> subprocess.CompletedProcess[str]:
    """Run and keep what it prints."""
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)


def gpu_seen() -> bool:
    """Whether this machine has an NVIDIA GPU, as far as that can be told without any library."""
    places = (Path("/dev/nvidiactl"), Path("/proc/driver/nvidia"))
    return shutil.which("nvidia-smi") is not None or any(place.exists() for place in places)


def probe(python: Path | str) -> dict[str, Any]:
    """What a Python can import: cuda: torch, with a CUDA device; te: Transformer Engine; why: if not both."""
    done = ask(python, "-c", PROBE)
    try:
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):  # the import ended the process
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"cuda": False, "te": False, "why": f"exit code {done.returncode}: {last}"}
    return found


def requirements(extra: str = "") -> list[str]:
    """What the project needs, or what one of its extras adds to that."""
    import tomllib  # not at the top: an older Python has to get as far as saying that it is too old

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found: list[str] = project["optional-dependencies"][extra] if extra else project["dependencies"]
    return found


class Environment:
    """The virtual environment that the commands run in."""

    def __init__(self, folder: Path, gpu: bool) -> None:
        self.folder = folder
        self.gpu = gpu
        self.python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
        parts = [(ROOT / name).read_text(encoding="utf-8") for name in ("pyproject.toml", "constraints.txt")]
        parts += [sys.version, sys.prefix, os.environ.get("PYTHONPATH", ""), str(gpu)]
        self.made_for = hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def prepare(self, extra: str = "") -> None:
        """Make the environment unless it is there and made for this; install what an extra adds.

        Raises:
            Failure: it cannot be made.
        """
        stamp = self._stamp()
        if stamp.get("made_for") != self.made_for or not self.python.exists():
            self._make()
            stamp = {"made_for": self.made_for, "extras": [""]}
            self._write(stamp)
        if extra not in stamp["extras"]:
            self._install(extra)
            self._write({**stamp, "extras": [*stamp["extras"], extra]})

    def _stamp(self) -> dict[str, Any]:
        file = self.folder / STAMP
        if file.exists():
            stamp: dict[str, Any] = json.loads(file.read_text())
            return stamp
        if self.folder.exists() and any(self.folder.iterdir()):
            raise Failure(
                f"{self.folder} was not made by try.py, so it is left alone. "
                "Remove it, or name another folder with LOWPREC_VENV."
            )
        return {}

    def _write(self, stamp: dict[str, Any]) -> None:
        (self.folder / STAMP).write_text(json.dumps(stamp))

    def _make(self) -> None:
        found = {"cuda": False, "te": False, "why": ""}
        if self.gpu:
            with step("there is an NVIDIA GPU; looking for PyTorch and Transformer Engine"):
                found = probe(sys.executable)
        if self.folder.exists():
            shutil.rmtree(self.folder)
        self.folder.mkdir(parents=True)
        self._write({})  # first, so that an environment whose making was interrupted is known as ours
        with step(f"making {self.folder}"):
            self._create(inherits_pip=bool(found["cuda"]) and find_spec("pip") is not None)
        if found["cuda"]:
            self._inherit()
            say(f"  with PyTorch{' and Transformer Engine' if found['te'] else ''} from {sys.prefix}")
        self._install()
        if self.gpu and not found["te"]:
            self._install_te()

    def _create(self, inherits_pip: bool) -> None:
        # An inherited pip is better than a new one: with that comes, under Python 3.11, an old setuptools, which
        # would hide the inherited one and cannot build the project without a network.
        try:
            import venv

            venv.EnvBuilder(with_pip=not inherits_pip, symlinks=os.name != "nt").create(self.folder)
        except (ImportError, subprocess.CalledProcessError) as error:
            raise Failure(
                f"Python's venv module cannot make an environment with pip ({error}). "
                "On Debian and Ubuntu it is a package of its own: apt install python3-venv"
            ) from error

    def _inherit(self) -> None:
        """Let the environment see the packages of the Python that runs this file, after its own.

        Not by `system_site_packages`: those are the base Python's, and the one that runs this file is often that
        of a virtual environment itself.
        """
        places = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
        self._path_file("inherited", [f"import site; site.addsitedir({place!r})" for place in places])

    def _path_file(self, name: str, lines: Sequence[str]) -> None:
        own = ask(self.python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").stdout.strip()
        Path(own, f"{name}.pth").write_text("".join(f"{line}\n" for line in lines))

    def _pip(self, *arguments: object, **options: Any) -> bool:
        quiet = ("-qq", "--disable-pip-version-check")  # errors only
        return run(self.python, "-m", "pip", "install", *quiet, *arguments, **options) == 0

    def _install(self, extra: str = "") -> None:
        """The project, editable, with what it needs and what an extra adds."""
        wanted = [*requirements(), *(requirements(extra) if extra else [])]
        missing = ask(self.python, "-c", MISSING, *wanted).stdout.splitlines()
        if not missing and extra:
            return
        if missing:
            constraints = () if self.gpu else ("-c", ROOT / "constraints.txt")
            with step(f"installing {', '.join(missing)}"):
                done = self._pip(*constraints, "-e", f"{ROOT}[{extra}]" if extra else ROOT)
            if not done:
                raise Failure(f"pip could not install {', '.join(missing)}; its own words are above.")
            return
        with step("installing this project; all that it needs is there"):  # so no network is asked for anything
            done = self._pip("--no-build-isolation", "--no-deps", "-e", ROOT)
        if not done:
            say("  pip cannot; the environment reads it from this folder (there is no command `lowprec` then)")
            self._path_file("lowprec_callback", [str(ROOT)])

    def add_te_files(self) -> None:
        """TE's Python files alone, where there is no TE: tests hold the recipe cards against its real classes."""
        if self.gpu or ask(self.python, "-m", "pip", "show", "-q", "transformer-engine").returncode == 0:
            return
        with step(f"adding the Python files of {TE_FILES}"):
            if not self._pip("--no-deps", TE_FILES):
                say("  pip could not; the tests that need them are skipped")

    def _install_te(self) -> None:
        log = self.folder / "transformer_engine.log"  # a build that fails writes hundreds of lines
        what = "installing Transformer Engine, built from source: this can take half an hour"
        with step(what), log.open("w") as file:
            to_log = {"stdout": file, "stderr": subprocess.STDOUT}
            if self._pip("setuptools", "wheel", "ninja", "cmake", "pybind11", "packaging", **to_log):
                self._pip("--no-build-isolation", *requirements("te"), **to_log)
            found = probe(self.python)
        if not found["te"]:
            print(TE_ADVICE.format(folder=self.folder, why=found["why"], log=log), flush=True)


def profile(environment: Environment, arguments: list[str]) -> int:
    """The first command. It takes this process's place where it can, so that Ctrl-C is its own business."""
    environment.prepare()
    command = [str(environment.python), str(ROOT / "examples" / "mini_gpt" / "train.py"), *arguments]
    if os.name != "nt":
        sys.stdout.flush()
        os.execv(command[0], command)
    return run(*command)


def test(environment: Environment, arguments: list[str]) -> int:
    """The second command. All checks run, also after a failure; the exit code is the first failure's."""
    environment.prepare("test")
    environment.add_te_files()
    codes = []
    # Two processes, a file each at a time; on a GPU one, since what is timed there must not share it.
    together = [] if environment.gpu else ["-n", "2", "--dist", "loadfile"]
    for check in (["ruff", "check", "."], ["mypy"], ["pytest", *together, *arguments]):
        with step(" ".join(check)):
            codes.append(run(environment.python, "-m", *check, cwd=ROOT))
    say("FAILED" if any(codes) else "all passed")
    return next((code for code in codes if code), 0)


def main(arguments: list[str]) -> int:
    """Exit code of the command; 1 and a sentence if it cannot be run; 130 after Ctrl-C."""
    if sys.version_info < (3, 11):  # noqa: UP036  (nothing has checked that before this file runs)
        print(f"[try] Python 3.11 or newer is needed; this is {sys.version.split()[0]}", file=sys.stderr)
        return 1
    folder = Path(os.environ.get("LOWPREC_VENV") or ROOT / ".venv").resolve()
    try:
        if Path(sys.prefix).resolve() == folder:
            raise Failure(f"this Python is the one in {folder}: run try.py with the one that it was made from.")
        environment = Environment(folder, gpu_seen())
        if arguments[:1] == ["test"]:
            return test(environment, arguments[1:])
        return profile(environment, arguments)
    except Failure as failure:
        print(f"[try] {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("[try] stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
