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
from moxie.refresh import refresh_

MARKER = "moxie_checkpoint.json"
_NAME = re.compile(r"step-(\d+)")
AnyPath = str | os.PathLike


def _folder_of(folder: AnyPath, step: int) -> pathlib.Path:
    return pathlib.Path(folder) / f"step-{step:08d}"


def _fault(path: pathlib.Path) -> str | None:
    """Why the folder is no valid checkpoint; None if it is one."""
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
    if _group_is_up():
        agree(op, group, describe)
    else:
        describe()


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
    """Saves the model, the optimizer and `extra`, anything that pickles, as step-<step> in the folder. Every rank calls it.

    What a save that did not end has left there is removed; a valid checkpoint of that step is refused.

    >>> model = torch.nn.Linear(4, 4)
    >>> path = moxie.distributed.checkpoint.save(folder, 10, model, extra={"tokens": 4096})
    >>> moxie.distributed.checkpoint.steps(folder)
    [10]
    """
    op = "checkpoint.save"
    path = _folder_of(folder, step)
    state: dict[str, Any] = {}

    def describe() -> dict[str, object]:
        if not isinstance(step, int) or step < 0:
            raise ValueError(f"{op}: step must be an integer of 0 or more, got {step!r}")
        if _fault(path) is None:
            raise ValueError(f"{op}: step must be new, and there is a valid checkpoint at {path}")
        return {"step": step, "the folder": path.absolute(), "whether there is an optimizer": optimizer is not None}

    _agree(op, group, describe)
    state.update(whole_experts(model, _state_of(model, optimizer)), extra=extra or {})

    def clear() -> dict[str, object]:
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
    except CheckpointException as error:  # which is no Exception
        raise RuntimeError(f"{op}: {path} could not be written: {error}") from error
    _agree(op, group, dict)  # all have written
    if _is_first(group):
        _write_marker(path, step, dist.get_world_size(group) if _group_is_up() else 1)
    _agree(op, group, dict)  # it is valid before any rank goes on
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
    """Loads the last valid checkpoint of the folder, or that of `step`; returns its step and `extra`. Every rank calls it.

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
        elif (fault := _fault(_folder_of(folder, step))) is not None:
            raise ValueError(f"{op}: {_folder_of(folder, step)} is no valid checkpoint: {fault}")
        return {"the step": chosen[0], "whether there is an optimizer": optimizer is not None}

    _agree(op, group, describe)
    assert chosen[0] is not None
    path = _folder_of(folder, chosen[0])
    reader = dcp.FileSystemReader(path)
    state = _state_of(model, optimizer)
    planned = whole_experts(model, state)
    planned["extra"] = _extra_of(reader)
    _agree(op, group, lambda: _compared(op, reader, planned))
    try:
        dcp.load(planned, storage_reader=reader, process_group=group, no_dist=not _group_is_up())
    except CheckpointException as error:  # which is no Exception
        raise RuntimeError(f"{op}: {path} could not be read: {error}") from error
    set_model_state_dict(model, state["model"])
    if optimizer is not None:
        # What is no tensor, such as the counts of steps and learning rates, was put into the plan.
        set_optimizer_state_dict(model, optimizer, optim_state_dict=_restored(state["optimizer"], planned["optimizer"]))
    refresh_(model)
    return chosen[0], planned["extra"]


def _extra_of(reader: dcp.FileSystemReader) -> dict[str, Any]:
    """A place for each entry of extra, whose names the checkpoint knows."""
    entries = reader.read_metadata().planner_data or {}
    return {path[1]: None for path in entries.values() if path[0] == "extra" and len(path) > 1}


def _restored(own: Any, loaded: Any) -> Any:
    """`loaded` with the tensors of `own`, into which it was loaded."""
    if isinstance(loaded, dict):
        return {name: _restored(own[name], value) for name, value in loaded.items()}
    return own if isinstance(own, Tensor) else loaded


def _compared(op: str, reader: dcp.FileSystemReader, planned: dict[str, Any]) -> dict[str, object]:
    """Refuses a checkpoint that lacks a tensor of the model, or has it in another shape."""
    saved = reader.read_metadata().state_dict_metadata
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
    return {}
