"""How benchmarks distribute rows over groups: every distribution has one name, used in all of them.

All are random, but the same in every run with the same rows and groups.
"""

import random

import torch


def ragged(rows: int, groups: int) -> list[int]:
    """Random sizes from 0.5 to 1.5 times the mean, none a multiple of 8; their sum is rows."""
    rng = random.Random(rows * groups)
    shares = [rng.uniform(0.5, 1.5) for _ in range(groups)]
    sizes = [int(rows * share / sum(shares)) for share in shares]
    largest = sizes.index(max(sizes))
    others = [g for g in range(groups) if g != largest]
    for g in others:
        sizes[g] += sizes[g] % 8 == 0
    sizes[largest] = rows - sum(sizes[g] for g in others)
    if sizes[largest] % 8 == 0 and others:
        step = 1 if sizes[others[0]] % 8 < 7 else -1
        sizes[others[0]] += step
        sizes[largest] -= step
    return sizes


def zipf(rows: int, groups: int) -> list[int]:
    """Sizes: the largest is at least twice the mean, one is 0, and no other is a multiple of 8; their sum is about rows."""
    if groups == 1:
        return [rows]
    shares = [(i + 1) ** -0.7 for i in range(groups - 1)] + [0.0]
    sizes = [int(rows * share / sum(shares)) for share in shares]
    sizes = [size - 1 if size % 8 == 0 and size else size for size in sizes]
    random.Random(rows * groups).shuffle(sizes)
    return sizes


def random_ends(rows: int, groups: int) -> list[int]:
    """Sizes of groups that end at random rows; their sum is rows."""
    rng = random.Random(rows * groups)
    ends = [*sorted(rng.randint(0, rows) for _ in range(groups - 1)), rows]
    return [end - begin for begin, end in zip([0, *ends], ends)]


def half_empty(rows: int, groups: int) -> list[int]:
    """Sizes of which half are 0 and the others decrease as 1 / n, in random order; their sum is rows."""
    full = groups - groups // 2
    shares = [1 / (i + 1) for i in range(full)]
    sizes = [int(rows * share / sum(shares)) for share in shares] + [0] * (groups - full)
    sizes[0] += rows - sum(sizes)
    random.Random(rows * groups).shuffle(sizes)
    return sizes


def aligned(sizes: list[int], alignment: int) -> list[int]:
    """Rounds each size to a multiple of the alignment, and changes the largest so that the sum stays (rounded down)."""
    rounded = [max(round(size / alignment), size > 0) * alignment for size in sizes]
    rounded[sizes.index(max(sizes))] += sum(sizes) // alignment * alignment - sum(rounded)
    return rounded


def offs_of(sizes: list[int], device: str | torch.device) -> torch.Tensor:
    return torch.tensor(sizes).cumsum(0).to(device=device, dtype=torch.int32)
