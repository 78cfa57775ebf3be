"""What the FP8 wire of expert parallelism does to weight gradients, and how far they are from those without it.

Over the wire x and dy arrive in e4m3, with a scale for each block of a row, and what wgrad contracts is made from that
(requantize, which is quantize of the decoded tokens). Nothing else in the layer depends on the wire. So over the FP8 wire dw13
and dw2 are, bit for bit, those of one process whose x and dy were rounded to FP8 before, whatever the rule: rounding rounded
tokens again changes no value. That is how tests compare; `rounded_to_fp8` makes the tokens. It needs no bound.

How far is that from one process with the tokens as they are? Scales are powers of two, and by the rules rceil and ceil nothing
clips. An element that is normal in its block of the row and in its block of the column keeps the same four bits either way.
With the tokens as they are it is rounded once, in a block of the column with scale s; over the wire twice, in a block of the
row and in one of the column. For each of these roundings in which it is subnormal, which is below 2^-6 s, add 2^-9 s: the two
ways differ by at most that (test_wire_rounding.py). The product with the other operand has these differences, and if it is
rounded to bf16, those that move an element over a rounding boundary show as an ulp of it, however small they are. How much this
is hangs on the data alone:

- Normal x: s is 2^-7, and one element in 10^4 is below 2^-13. Products in f64 of 256 rows have 143 dB, and 130 dB if all
  differences were at their largest and of one sign. In bf16, 6 of 262,144 elements of a product of 4096 rows differ, by an
  ulp: 108 dB.
- Heavy-tailed x (exp(2 n) n): blocks have elements of 10^2 and more, and with blocks of 32 one element in 50 is subnormal, with
  blocks of 128 one in 20. Products of 4096 rows have 100 and 94 dB in f64, 77 and 73 dB in bf16.

So in bf16 a small matrix is right to 100 dB or not at all, by the luck of one element, and FLOOR is no bound for other data or
sizes: it holds for the data that tests of CPUs draw, and docs/EXPERT_PARALLEL.md promises it for these.
"""

import math

from torch import Tensor

import moxie
from moxie.recipe import Recipe

FLOOR = {"normal": 100.0, "heavy_tailed": 80.0}  # decibels


def rounded_to_fp8(x: Tensor, recipe: str) -> Tensor:
    """Tokens as they come out of the FP8 wire."""
    made = Recipe.from_name(recipe)
    qdata, scale = moxie.quantize_rowwise(x, block=made.activations, rule=made.rule)
    return moxie.dequantize_rowwise(qdata, scale, block=made.activations, dtype=x.dtype)


def decibels(actual: Tensor, expected: Tensor) -> float:
    noise = (actual.double() - expected.double()).norm().item()
    return math.inf if noise == 0 else 20 * math.log10(expected.double().norm().item() / noise)
