"""What kind of thing an object is, by its class alone: how it is kept, or why it is left alone.

User code's objects are followed, and so are the parts of PyTorch and Lightning that training is made of. Other
libraries keep their own books: their objects stand for native memory, connections, things outside of this process, and
to set them back would break them. Between the two are things of the standard library, each with a rule of its own:
containers, functions, iterators, files, random generators.
"""

from __future__ import annotations

import argparse
import array
import collections
import concurrent.futures
import copy
import enum
import functools
import io
import logging
import multiprocessing.process
import queue
import random
import socket
import subprocess
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from lowprec_callback.sweep.kept_objects import NESTED_ITERATORS, OWN, SIMPLE_ITERATORS, has

LIGHTNING = frozenset({"lightning", "pytorch_lightning", "lightning_fabric"})
"""Lightning's packages. Modules, data modules and callbacks of theirs are followed; nothing else is."""

LIBRARIES = frozenset(
    """
    numpy pandas pyarrow PIL h5py datasets tokenizers transformer_engine transformer_engine_torch torchao scipy polars
    triton nvidia cupy jax jaxlib tensorflow cv2 av decord lmdb zarr tables nvtx pynvml
    wandb mlflow comet_ml neptune clearml aim tensorboard tensorboardX tqdm rich loguru matplotlib
    ray dask pyspark sqlalchemy boto3 botocore requests urllib3 httpx aiohttp grpc zmq fsspec s3fs gcsfs google azure
    """.split()  # noqa: SIM905
)
"""Packages whose objects hold what cannot be set back from here: native memory, connections, books of their own."""

ALSO_FOLDERS = frozenset({"datasets", "tokenizers"})
"""Of these, names that people give to folders of their own as well: a library only if it is installed as one."""

FOLLOWED_PARTS_OF_TORCH = ("torch.utils.data", "torch.nn", "torch.optim", "torch.amp")

OUTSIDE = frozenset({"Trainer", "Strategy", "Logger", "Accelerator", "Fabric", "Profiler", "CheckpointIO", "_Loop"})
"""Lightning's classes whose subclasses are not followed either, whoever wrote them."""


class Kind(enum.Enum):
    """What is done with an object. Those that are `SKIPPED` are held as they are; `UNKEPT` ones are told of."""

    SKIPPED = enum.auto()
    TENSOR = enum.auto()
    ARRAY = enum.auto()
    STATE = enum.auto()
    HAS_STATE = enum.auto()
    FILE = enum.auto()
    MAPPING = enum.auto()
    SEQUENCE = enum.auto()
    BYTES = enum.auto()
    FIXED = enum.auto()
    CALLABLE = enum.auto()
    ITERATOR = enum.auto()
    UNKEPT = enum.auto()
    MODULE = enum.auto()
    OBJECT = enum.auto()


_CALLABLES = (
    types.FunctionType,
    types.MethodType,
    types.BuiltinMethodType,
    types.MethodWrapperType,
    functools.partial,
)

_NEVER: tuple[type, ...] = (
    types.ModuleType,
    type,
    BaseException,
    enum.Enum,
    threading.Thread,
    logging.Logger,
    logging.Handler,
    weakref.ref,
    subprocess.Popen,
    concurrent.futures.Executor,
    multiprocessing.process.BaseProcess,
)
"""Neither these nor a user's subclasses of them are followed."""

_PLAIN = (
    argparse.Namespace,
    types.SimpleNamespace,
    collections.UserDict,
    collections.UserList,
    collections.ChainMap,
)
"""Classes of the standard library that do nothing but hold values."""

ATOMS = frozenset(
    {int, float, complex, bool, str, bytes, type(None), type(...), range, slice, torch.dtype, torch.device, torch.Size}
)
"""Types of values that cannot change and lead nowhere."""

_FILE = io.IOBase.__mro__[1]
"""What all files are made from; `io.IOBase` itself only registers the builtin ones."""

_CURSOR_METHODS = ("fetchone", "fetchmany")


def package_of(cls: type) -> str:
    """The top-level package in which a class is written."""
    module = cls.__dict__.get("__module__", cls.__module__)
    return module.partition(".")[0] if isinstance(module, str) else ""


def is_library(package: str) -> bool:
    """Whether a package keeps its own books, as this one does."""
    if package not in LIBRARIES:
        return package == OWN
    if package not in ALSO_FOLDERS:
        return True
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


def written_class(cls: type) -> type:
    """The class as it was written: FSDP's `fully_shard` puts one of its own (`FSDPLinear`) in front of it."""
    mro = cls.__mro__
    return mro[2] if len(mro) > 2 and mro[1].__name__ == "FSDPModule" else cls


def is_followed(cls: type) -> bool:
    """Whether the attributes of an object of this class are kept: user code's are, a library's are not."""
    package, mro = package_of(cls), cls.__mro__
    if cls.__name__ == "Trainer" or is_library(package):
        return False
    if any(each.__name__ in OUTSIDE and package_of(each) in LIGHTNING for each in mro):
        return False
    if torch.amp.GradScaler in mro:
        return True
    parts_of_training = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, Dataset, Sampler, DataLoader)
    if package == "torch":
        name = cls.__module__
        if name.startswith(("torch.nn.parallel", "torch.distributed")):
            return False
        return name.startswith(FOLLOWED_PARTS_OF_TORCH) or any(each in mro for each in parts_of_training)
    if package in LIGHTNING:
        names = {each.__name__ for each in mro}
        wanted = {"LightningModule", "LightningDataModule", "Callback"}
        return bool(names & wanted) or any(each in mro for each in parts_of_training)
    if package in sys.stdlib_module_names:
        return cls in _PLAIN
    # Not a class of the user's that is a process group, a store or another of torch's native objects as well.
    return not any(each.__module__.startswith("torch._C") for each in mro)


def keeps_own_attributes(cls: type) -> bool:
    """Whether a module's own attributes are kept; those of wrappers and of Transformer Engine's modules are theirs.

    The engine restores Transformer Engine's modules. Their subclasses count as well: quantizers are among the
    attributes, and must not come back in the middle of a sweep.
    """
    if torch.jit.ScriptModule in cls.__mro__ or any(package_of(each) == "transformer_engine" for each in cls.__mro__):
        return False
    return not written_class(cls).__module__.startswith(("torch.distributed", "torch.nn.parallel", "torch._dynamo"))


def kind_of(cls: type) -> tuple[Kind, Any]:
    """(what to do with objects of this class, a detail that depends on it)."""
    mro = cls.__mro__
    if any(each in mro for each in _NEVER) or _BaseDataLoaderIter in mro:
        return Kind.SKIPPED, None
    if torch.Tensor in mro:
        return Kind.TENSOR, None
    if np.ndarray in mro:
        return Kind.ARRAY, None
    if (how := next((how for base, how in _STATEFUL.items() if base in mro), None)) is not None:
        return (Kind.HAS_STATE if is_followed(cls) else Kind.STATE), how
    if cls in _CALLABLES or functools.partial in mro:
        return Kind.CALLABLE, None
    if cls in SIMPLE_ITERATORS or cls in NESTED_ITERATORS:
        return Kind.ITERATOR, None
    if any(each in mro for each in (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)):
        return Kind.UNKEPT, "generator"
    if any(each.__module__ in ("queue", "_queue", "multiprocessing.queues") for each in mro) or queue.Queue in mro:
        return Kind.UNKEPT, "queue"
    if socket.socket in mro:
        return Kind.UNKEPT, "socket"
    if _FILE in mro:
        return Kind.FILE, None
    return _kind_of_holder(cls)


def _kind_of_holder(cls: type) -> tuple[Kind, Any]:
    """The same for containers and for objects with attributes."""
    mro, followed = cls.__mro__, is_followed(cls)
    for base, kind in (
        (dict, Kind.MAPPING),
        (list, Kind.SEQUENCE),
        (set, Kind.SEQUENCE),
        (collections.deque, Kind.SEQUENCE),
        (bytearray, Kind.BYTES),
        (array.array, Kind.BYTES),
        (tuple, Kind.FIXED),
        (frozenset, Kind.FIXED),
    ):
        if base in mro:
            return (Kind.SKIPPED, None) if is_library(package_of(cls)) else (kind, base)
    if nn.Module in mro:
        return Kind.MODULE, None
    cursor = cls.__name__.lower().endswith("cursor")
    if cursor and (not followed or any(has(cls, name) for name in _CURSOR_METHODS)):
        return Kind.UNKEPT, "cursor"
    if followed:
        return Kind.OBJECT, None  # an iterator's position, too, is among its attributes if its class is in Python
    return (Kind.UNKEPT, "iterator") if has(cls, "__next__") and package_of(cls) != OWN else (Kind.SKIPPED, None)


def _torch_generator(generator: torch.Generator) -> tuple[Callable[[Any], Any], Any]:
    return generator.set_state, torch.Generator.get_state(generator)


def _bit_generator(generator: np.random.BitGenerator) -> tuple[Callable[[Any], Any], Any]:
    return functools.partial(setattr, generator, "state"), copy.deepcopy(generator.state)


def _numpy_generator(generator: np.random.Generator) -> tuple[Callable[[Any], Any], Any]:
    return _bit_generator(generator.bit_generator)


def _random_state(generator: np.random.RandomState) -> tuple[Callable[[Any], Any], Any]:
    state = np.random.RandomState.get_state(generator, legacy=False)
    return functools.partial(np.random.RandomState.set_state, generator), copy.deepcopy(state)


def _python_random(generator: random.Random) -> tuple[Callable[[Any], Any], Any]:
    return functools.partial(random.Random.setstate, generator), random.Random.getstate(generator)


_STATEFUL: dict[type, Callable[[Any], tuple[Callable[[Any], Any], Any]]] = {
    torch.Generator: _torch_generator,
    np.random.BitGenerator: _bit_generator,
    np.random.Generator: _numpy_generator,
    np.random.RandomState: _random_state,
    random.Random: _python_random,
}
"""Random generators: from one of them to (the function that takes its state, its state)."""
