"""Sharded models on 2 and 4 ranks: FSDP2, tensor parallelism, both, and checkpoints.

The cases are functions of the *_cases.py modules; all of a world size run in one spawn.
"""

import inspect

import pytest

import distributed_cases
import ranks

MODULES = (distributed_cases,)


def cases_of(module) -> list[str]:
    return [
        name
        for name, one in inspect.getmembers(module, inspect.isfunction)
        if one.__module__ == module.__name__ and list(inspect.signature(one).parameters) == ["world"]
    ]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    done: dict[tuple[str, int], dict] = {}

    def of(module, size):
        if (module.__name__, size) not in done:
            folder = tmp_path_factory.mktemp("ranks")
            done[module.__name__, size] = ranks.run(module.__name__, cases_of(module), size, folder)
        return done[module.__name__, size]

    return of


@pytest.mark.parametrize("size", (2, 4))
@pytest.mark.parametrize(
    "module, name",
    [(module, name) for module in MODULES for name in cases_of(module)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_sharded(results, module, name, size):
    wrong = results(module, size)[name]
    assert not wrong, "\n".join(f"rank {rank}: {text}" for rank, text in wrong.items())
