"""moxie.nn.MoE over a process group: runs the expert_parallel_*_cases.py of CPUs on 1, 2 and 4 ranks over Gloo (all cases in the
same processes), and tests groups in which a rank fails."""

import functools
import pathlib
import re
import subprocess
import sys

import pytest
import torch.distributed

import expert_parallel_bits_cases
import expert_parallel_bytes_cases
import expert_parallel_engine_cases
import expert_parallel_module_cases
import expert_parallel_ranks_cases
import expert_parallel_refusal_cases
import ranks

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="this torch has no Gloo"
)

MODULES = (
    expert_parallel_bits_cases,
    expert_parallel_ranks_cases,
    expert_parallel_refusal_cases,
    expert_parallel_module_cases,
    expert_parallel_bytes_cases,
    expert_parallel_engine_cases,
)
CASES = [f"{module.__name__}.{name}" for module in MODULES for name in module.NAMES]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Returns a function that maps a number of ranks to the errors of all cases. The cases run when it is first called with that
    number."""
    return functools.cache(lambda size: ranks.run(CASES, size, tmp_path_factory.mktemp("ranks")))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", (1, 2, 4))
def test_over_a_group(size, case, results):
    wrong = results(size)[case]
    assert not wrong, "\n".join(f"rank {rank}: {text}" for rank, text in wrong.items())


@pytest.mark.parametrize(("how", "where"), (("killed", "forward"), ("killed", "backward"), ("stalled", "backward")))
def test_a_failed_rank_is_named_by_the_others(how, where, tmp_path):
    """The ranks are plain processes, because a launcher would kill the surviving ranks when one fails."""
    size, timeout = 3, 10
    script = pathlib.Path(__file__).with_name("expert_parallel_failure.py")
    logs = [tmp_path / f"{rank}.log" for rank in range(size)]
    processes = []
    try:
        for rank, log in enumerate(logs):
            command = [sys.executable, script, str(rank), str(size), tmp_path / "store", str(timeout), how, where]
            with log.open("wb") as output:
                processes.append(
                    subprocess.Popen(
                        command, env=ranks.environment(), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
                    )
                )
        codes = [process.wait(timeout=300) for process in processes[:-1]]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    outputs = [log.read_text(errors="replace") for log in logs[:-1]]
    assert codes == [7] * (size - 1), outputs
    for rank, output in enumerate(outputs):
        print(output)
        message = re.search(r"raised after [\d.]+ s: (.*)", output)
        assert message is not None, output
        assert "expert_mlp: the exchange of " in message[1], output
        assert f"failed on rank {rank} of the {size} ranks of group" in message[1], output
        assert f"no word from rank {size - 1}:" in message[1], output
