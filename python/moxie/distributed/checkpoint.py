"""Checkpoints that any number of ranks can load, on any mesh, into converted and stock models alike.

torch.distributed.checkpoint (DCP) writes each rank's shards with their places in whole tensors. Two kinds of shards it cannot
place by itself: those of `gate_up_shard()`, which are two runs of rows, and the experts of an `ep_group`, which are plain
parameters of their rank. A checkpoint is a folder `step-<step>`; it counts once rank 0 has written its marker, the last file.
"""

import json
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from moxie.distributed.agree import agree
from moxie.distributed.chunks import whole_experts
from moxie.distributed.extra import packed, unpacked
from moxie.refresh import refresh_

MARKER = "moxie_checkpoint.json"
_NAME = re.compile(r"step-(\d+)")
AnyPath = str | os.PathLike


def _folder_of(folder: AnyPath, step: int) -> pathlib.Path:
    return pathlib.Path(folder) / f"step-{step:08d}"


def _fault(path: pathlib.Path) -> str | None:
    """Returns why the folder is no valid checkpoint, or None if it is one."""
    try:
        marker = json.loads((path / MARKER).read_text())
        sizes = {str(name): int(size) for name, size in marker["files"].items()}
    except FileNotFoundError:
        return f"it has no {MARKER}, so its save did not end"
    except (OSError, ValueError, KeyError, AttributeError) as error:
        return f"its {MARKER} cannot be read ({error})"
    for name, size in sizes.items():
        found = (path / name).stat().st_size if (path / name).exists() else None
        if found != size:
            return f"{name} must have {size} bytes, got {'no file' if found is None else found}"
    return None


def steps(folder: AnyPath) -> list[int]:
    """The steps of the valid checkpoints in a folder, in order.

    >>> moxie.distributed.checkpoint.steps("no such folder")
    []
    """
    path = pathlib.Path(folder)
    found = [(int(match[1]), one) for one in (path.iterdir() if path.is_dir() else ()) if (match := _NAME.fullmatch(one.name))]
    return sorted(step for step, one in found if _fault(one) is None)


def _state_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(model, optimizer)
    return state


def _group_is_up() -> bool:
    return dist.is_available() and dist.is_initialized()


def _agree(op: str, group: dist.ProcessGroup | None, describe: Callable[[], Mapping[str, Any]]) -> None:
    def named() -> Mapping[str, Any]:
        try:
            return describe()
        except OSError as error:
            raise ValueError(f"{op}: folder must be one that every rank can use, got {error}") from error

    if _group_is_up():
        agree(op, group, named)
    else:
        named()


def _check_step(op: str, step: int) -> None:
    if not isinstance(step, int) or step < 0:
        raise ValueError(f"{op}: step must be an integer of 0 or more, got {step!r}")


def _is_first(group: dist.ProcessGroup | None) -> bool:
    return not _group_is_up() or dist.get_rank(group) == 0


def save(
    folder: AnyPath,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: dict[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
) -> pathlib.Path:
    """Saves the model, the optimizer and `extra` as step-<step> in the folder. Every rank calls it.

    `extra` is a dict of numbers, strings, None, tensors, and lists, tuples and dicts of them: what torch.load(weights_only=True)
    takes. That of the group's rank 0 is saved, and every rank gets it back, tensors on the CPU.

    What a save that did not end has left there is removed; a valid checkpoint of that step is refused.

    >>> model = torch.nn.Linear(4, 4)
    >>> path = moxie.distributed.checkpoint.save(folder, 10, model, extra={"tokens": 4096})
    >>> moxie.distributed.checkpoint.steps(folder)
    [10]
    """
    op = "checkpoint.save"
    state: dict[str, Any] = {}

    def describe() -> dict[str, object]:
        _check_step(op, step)
        path = _folder_of(folder, step)
        if extra is not None and not isinstance(extra, dict):
            raise TypeError(f"{op}: extra must be a dict, got {type(extra).__name__}")
        if _is_first(group):
            state["extra"] = packed(op, extra)
        if _fault(path) is None:
            raise ValueError(f"{op}: step must be new, and there is a valid checkpoint at {path}")
        return {"step": step, "the folder": path.absolute(), "whether there is an optimizer": optimizer is not None}

    _agree(op, group, describe)
    path = _folder_of(folder, step)

    def clear() -> dict[str, object]:
        state.update(whole_experts(op, model, _state_of(model, optimizer)))
        shapes: dict[str, object] = {
            f"the shape of {name}": tuple(tensor.size()) for name, tensor in state["model"].items() if hasattr(tensor, "size")
        }
        if _is_first(group):
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
        return shapes

    _agree(op, group, clear)
    try:
        dcp.save(state, checkpoint_id=path, process_group=group, no_dist=not _group_is_up())
    except CheckpointException as error:  # CheckpointException derives from BaseException only
        raise RuntimeError(f"{op}: {path} could not be written: {error}") from error
    _agree(op, group, dict)  # wait until all ranks have written

    def mark() -> dict[str, object]:
        if _is_first(group):
            _write_marker(path, step, dist.get_world_size(group) if _group_is_up() else 1)
        return {}

    _agree(op, group, mark)  # so that no rank returns before the checkpoint is valid
    return path


def _write_marker(path: pathlib.Path, step: int, ranks: int) -> None:
    files = {one.name: one.stat().st_size for one in sorted(path.iterdir())}
    partial = path.parent / f".{path.name}.marker"
    with open(partial, "w") as file:
        json.dump({"step": step, "ranks": ranks, "files": files}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path / MARKER)
    for one in (path, path.parent):
        handle = os.open(one, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def load(
    folder: AnyPath,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> tuple[int, dict[str, Any]]:
    """Loads the folder's last valid checkpoint, or that of `step`; returns its step and `extra`. Every rank must call it.

    >>> path = moxie.distributed.checkpoint.save(folder, 20, torch.nn.Linear(4, 4), extra={"tokens": 4096})
    >>> moxie.distributed.checkpoint.load(folder, torch.nn.Linear(4, 4))
    (20, {'tokens': 4096})
    """
    op = "checkpoint.load"
    chosen = [step]

    def describe() -> dict[str, object]:
        if step is None:
            valid = steps(folder)
            if not valid:
                raise ValueError(f"{op}: folder must hold a valid checkpoint, got {os.fspath(folder)!r}, which holds none")
            chosen[0] = valid[-1]
        else:
            _check_step(op, step)
            if (fault := _fault(_folder_of(folder, step))) is not None:
                raise ValueError(f"{op}: {_folder_of(folder, step)} is no valid checkpoint: {fault}")
        return {"the step": chosen[0], "whether there is an optimizer": optimizer is not None}

    _agree(op, group, describe)
    assert chosen[0] is not None
    path = _folder_of(folder, chosen[0])
    reader = dcp.FileSystemReader(path)
    state: dict[str, Any] = {}
    planned: dict[str, Any] = {}

    def plan() -> dict[str, object]:
        state.update(_state_of(model, optimizer))
        planned.update(whole_experts(op, model, state))
        saved = reader.read_metadata().state_dict_metadata
        _compare(op, saved, planned)
        planned["extra"] = _bytes_of_extra(op, saved)
        return {}

    _agree(op, group, plan)
    try:
        dcp.load(planned, storage_reader=reader, process_group=group, no_dist=not _group_is_up())
    except CheckpointException as error:  # CheckpointException derives from BaseException only
        raise RuntimeError(f"{op}: {path} could not be read: {error}") from error

    def put() -> dict[str, object]:
        set_model_state_dict(model, state["model"])
        if optimizer is not None:
            # Values that are no tensors, such as learning rates, were loaded into `planned`, while tensors were loaded in place.
            set_optimizer_state_dict(model, optimizer, optim_state_dict=_restored(state["optimizer"], planned["optimizer"]))
        refresh_(model)
        planned["extra"] = unpacked(planned["extra"])
        return {}

    _agree(op, group, put)
    return chosen[0], planned["extra"]


def _bytes_of_extra(op: str, saved: dict[str, Any]) -> Tensor:
    """Returns a tensor of the right size to load `extra` into."""
    found = saved.get("extra")
    if not isinstance(found, TensorStorageMetadata):
        raise ValueError(f"{op}: the checkpoint must hold extra as a tensor of bytes, got {type(found).__name__}")
    return torch.empty(found.size, dtype=torch.uint8)


def _restored(own: Any, loaded: Any) -> Any:
    """Returns `loaded` with its tensors replaced by those of `own`, into whose memory they were loaded."""
    if isinstance(loaded, dict):
        return {name: _restored(own[name], value) for name, value in loaded.items()}
    return own if isinstance(own, Tensor) else loaded


def _compare(op: str, saved: dict[str, Any], planned: dict[str, Any]) -> None:
    """Raises if the checkpoint lacks a tensor of the model, or has it in another shape."""
    for part in ("model", "optimizer"):
        if part in planned and not any(name.startswith(f"{part}.") for name in saved):
            raise ValueError(
                f"{op}: the checkpoint must hold the {part}, and has only {', '.join(sorted({n.split('.')[0] for n in saved}))}"
            )
    for name, tensor in planned["model"].items():
        found = saved.get(f"model.{name}")
        if found is None:
            raise ValueError(f"{op}: the checkpoint must hold {name} of the model, and does not")
        if isinstance(found, TensorStorageMetadata) and tuple(tensor.size()) != tuple(found.size):
            raise ValueError(
                f"{op}: {name} must have the shape {tuple(tensor.size())}, got {tuple(found.size)} in the checkpoint"
            )
