"""`moxie compare` end to end, on a model so small that a run takes a second."""

import base64
import io
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
import types

import numpy
import pytest

from program import ROOT, command, edit_result, metrics, micro, run

RECIPES = ["bf16", "mxfp8_rceil"]
STUDENT_T_1 = 12.7062  # Student's t for a 95 % interval with one degree of freedom, that is two seeds
PICTURES = ["loss", "difference", "speed", "load", "error"]


def flags(out: pathlib.Path, **changed) -> dict:
    base = micro(out, recipe=None, layers=1, steps=3, save_every=0, eval_every=1, stats_every=1)
    return {**base, "recipes": RECIPES, "seeds": 2, **changed}


def compare(out: pathlib.Path, *args, code: int = 0, env: dict | None = None, **changed) -> subprocess.CompletedProcess:
    env = {"MOXIE_PYTHON": sys.executable, **(env or {})}
    done = run("compare", *args, env=env, **flags(out, **changed))
    assert done.returncode == code, done.stderr
    return done


def again(out: pathlib.Path, *args, code: int = 0, env: dict | None = None, **given) -> subprocess.CompletedProcess:
    """Resumes the comparison in `out` with these flags only, not with those of flags()."""
    done = run("compare", "--resume", *args, env={"MOXIE_PYTHON": sys.executable, **(env or {})}, out=out, **given)
    assert done.returncode == code, done.stderr
    return done


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[pathlib.Path, subprocess.CompletedProcess]:
    out = tmp_path_factory.mktemp("compare") / "out"
    return out, compare(out)


@pytest.fixture
def copy(finished, tmp_path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(finished[0], tmp_path / "out"))


# ---- what it prints ----------------------------------------------------------------------------


def test_the_table_has_a_row_for_each_recipe(finished):
    out, done = finished
    lines = done.stdout.splitlines()
    assert lines[0].split() == "recipe held-out loss difference 95 % interval tokens/s peak memory".split()
    assert re.match(r"bf16 +\d\.\d{4} +base +- +\S+ +\S+ MiB$", lines[1])
    assert re.match(r"mxfp8_rceil +\d\.\d{4} +[+-]\S+ % +[+-]\S+ % to [+-]\S+ % +\S+ +\S+ MiB$", lines[2])
    assert "bigram entropy" in done.stdout.lower() and "numerics, not speed" in done.stdout
    assert lines[-1] == f"Report: {out}/report.html"
    assert "mxfp8_rceil seed 2 (4/4)" in done.stderr


def test_the_json_is_what_the_runs_say(finished):
    out, _ = finished
    summary = json.loads((out / "compare.json").read_text())
    losses = {
        (recipe, seed): json.loads((out / f"{recipe}-seed{seed}" / "result.json").read_text())["eval_loss"]
        for recipe in RECIPES
        for seed in (1, 2)
    }
    assert len(set(losses.values())) == 4  # seeds and recipes matter
    base, mx = summary["recipes"]
    assert (base["recipe"], mx["recipe"], summary["base"]) == (*RECIPES, "bf16")
    differences = [100 * (losses["mxfp8_rceil", seed] / losses["bf16", seed] - 1) for seed in (1, 2)]
    assert [r["difference_percent"] for r in mx["runs"]] == pytest.approx(differences)
    middle, half = numpy.mean(differences), STUDENT_T_1 * numpy.std(differences, ddof=1) / 2**0.5
    assert mx["difference_percent"] == pytest.approx(middle)
    assert mx["interval_percent"] == pytest.approx([middle - half, middle + half], rel=1e-4)
    assert mx["eval_loss"] == pytest.approx(numpy.mean([losses["mxfp8_rceil", 1], losses["mxfp8_rceil", 2]]))
    assert summary["config"]["dim"] == 32 and "seed" not in summary["config"]


def test_runs_of_a_seed_begin_alike_and_see_the_same_data(finished):
    out, _ = finished
    first = {name: metrics(out / name, "step")[0]["loss"] for name in ("bf16-seed1", "mxfp8_rceil-seed1", "bf16-seed2")}
    assert first["mxfp8_rceil-seed1"] == pytest.approx(first["bf16-seed1"], rel=1e-2)
    assert first["bf16-seed2"] != first["bf16-seed1"]


# ---- the report --------------------------------------------------------------------------------


def pixels(data: bytes) -> numpy.ndarray:
    image = pytest.importorskip("matplotlib.image")
    return image.imread(io.BytesIO(data), format="png")


def test_every_picture_of_the_report_decodes_and_is_not_blank(finished):
    pytest.importorskip("matplotlib")
    out, _ = finished
    page = (out / "report.html").read_text()
    embedded = [base64.b64decode(data, validate=True) for data in re.findall(r'data:image/png;base64,([^"]+)"', page)]
    assert len(embedded) == 2 * len(PICTURES)  # light and dark
    files = sorted((out / "pictures").iterdir())
    assert [path.name for path in files] == sorted(f"{name}{form}.png" for name in PICTURES for form in ("", "-dark"))
    assert sorted(embedded) == sorted(path.read_bytes() for path in files)
    for path in files:
        shown = pixels(path.read_bytes())[..., :3]
        assert shown.shape[0] > 200 and shown.shape[1] > 800
        assert shown.std() > 0.02, f"{path.name} is blank"
        assert (shown.mean() > 0.5) == ("-dark" not in path.name)


def test_the_report_needs_no_other_file(finished):
    page = (finished[0] / "report.html").read_text()
    references = re.findall(r'(?:src|srcset|href)="([^"]{0,30})', page)
    assert all(reference.startswith("data:image/png;base64,") for reference in references)
    assert not re.search(r"https?://|<script|@import|url\(", page)


def test_the_report_is_in_words_too(finished):
    page = (finished[0] / "report.html").read_text()
    summary = json.loads((finished[0] / "compare.json").read_text())
    for recipe in summary["recipes"]:
        assert f"<code>{recipe['recipe']}</code></td><td>{recipe['eval_loss']:.4f}</td>" in page
    for image in re.findall(r"<img [^>]*>", page):
        assert len(re.search(r'alt="([^"]*)"', image)[1]) > 20
    assert page.count("<figcaption>") == page.count("<img ")
    assert "numerics, not speed" in page


def test_without_matplotlib_the_report_has_its_tables_and_one_line_says_why(copy, tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ImportError('hidden', name='matplotlib')")
    done = again(copy, env={"PYTHONPATH": str(tmp_path)})
    said = [line for line in done.stderr.splitlines() if line.startswith("moxie: ")]
    assert len(said) == 1 and "matplotlib" in said[0] and "MOXIE_PYTHON" in said[0]
    page = (copy / "report.html").read_text()
    assert "<code>mxfp8_rceil</code>" in page and "<img" not in page and "no pictures" in page
    assert "Report: " in done.stdout


def test_without_python_the_table_and_the_json_remain(copy):
    (copy / "report.html").unlink()
    (copy / "compare.json").unlink()
    done = again(copy, env={"MOXIE_PYTHON": "nowhere/python"})
    assert "mxfp8_rceil " in done.stdout and "Report: " not in done.stdout
    assert "'nowhere/python'" in done.stderr and "MOXIE_PYTHON" in done.stderr
    assert (copy / "compare.json").exists() and not (copy / "report.html").exists()


def test_what_lies_in_the_current_folder_is_not_imported(copy, tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise RuntimeError('not this one')")
    monkeypatch.chdir(tmp_path)
    assert "Report: " in again(copy).stdout


def test_what_is_not_finite_is_said_in_words(copy):
    edit_result(copy / "mxfp8_rceil-seed2", eval_loss=None, tokens_per_s=None)
    table = again(copy).stdout.split("\n\n")[0]
    assert "not finite to not finite" in table and "nan" not in table
    tables = re.findall(r"<td>(.*?)</td>", (copy / "report.html").read_text())
    assert "not finite" in tables and not any("nan" in cell for cell in tables)


def test_the_curve_is_of_evaluations_on_the_way_and_the_table_of_the_last_one(tmp_path):
    compare(tmp_path, seeds=1, eval_windows=4, final_eval_windows=12)
    out = tmp_path / "bf16-seed1"
    pictures = types.ModuleType("pictures")
    exec((ROOT / "moxie/cli/compare/pictures.py").read_text(), vars(pictures))
    evaluations = metrics(out, "eval")
    assert [line["windows"] for line in evaluations] == [4, 4, 4, 12]
    assert pictures.evaluations([{"events": metrics(out)}]) == ([1, 2, 3], [[line["loss"] for line in evaluations[:3]]])
    assert pictures.evaluations([{"events": evaluations[3:]}]) == ([3], [[evaluations[3]["loss"]]])
    summary = json.loads((tmp_path / "compare.json").read_text())
    assert summary["recipes"][0]["eval_loss"] == evaluations[3]["loss"]


# ---- resuming ----------------------------------------------------------------------------------


def test_resume_keeps_what_is_finished_and_trains_the_rest(copy):
    before = {path.parent.name: path.stat().st_mtime_ns for path in copy.glob("*/result.json")}
    losses = json.loads(again(copy, "--json").stdout)["recipes"]
    shutil.rmtree(copy / "mxfp8_rceil-seed2")
    done = again(copy, "--json")
    assert done.stderr.count("finished before") == 3 and "mxfp8_rceil seed 2 (4/4)" in done.stderr
    after = {path.parent.name: path.stat().st_mtime_ns for path in copy.glob("*/result.json")}
    assert {name for name in before if after[name] == before[name]} == set(before) - {"mxfp8_rceil-seed2"}
    assert [r["eval_loss"] for r in json.loads(done.stdout)["recipes"]] == [r["eval_loss"] for r in losses]


def test_a_comparison_that_knew_no_last_evaluation_goes_on_as_it_was(copy):
    plan = json.loads((copy / "plan.json").read_text())
    del plan["config"]["final_eval_windows"]
    (copy / "plan.json").write_text(json.dumps(plan))
    shutil.rmtree(copy / "bf16-seed1")
    again(copy)
    assert json.loads((copy / "bf16-seed1/result.json").read_text())["eval_windows"] == plan["config"]["eval_windows"]


def test_a_finished_comparison_says_so(copy):
    done = again(copy)
    assert "Nothing was left to train" in done.stderr and "mxfp8_rceil " in done.stdout


def test_a_failing_run_is_named_and_the_others_are_kept(tmp_path):
    out = tmp_path / "out"
    in_the_way = out / "mxfp8_rceil-seed1" / "checkpoints"  # this file, where the run needs a folder, makes the run fail
    in_the_way.parent.mkdir(parents=True)
    in_the_way.write_text("")
    done = compare(out, code=1, seeds=1)
    last = done.stderr.splitlines()[-1]
    for part in ("mxfp8_rceil seed 1", "exit code 1", f"moxie compare --resume --out {out}", "--recipes"):
        assert part in last
    assert (out / "bf16-seed1" / "result.json").exists() and not (out / "compare.json").exists()
    in_the_way.unlink()
    done = again(out, recipes=RECIPES, seeds=2)
    assert done.stderr.count("finished before") == 1 and "2 seeds" in done.stdout


@pytest.mark.parametrize("whom", ["the program alone", "its group"])
def test_an_interrupted_comparison_goes_on_to_the_same_numbers(tmp_path, whom):
    out = tmp_path / "out"
    changed = {"steps": 100, "seeds": 1, "eval_every": 0, "stats_every": 0}
    running = subprocess.Popen(
        command("compare", **flags(out, **changed)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    steps = out / "bf16-seed1" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (steps.exists() and steps.read_text().count("\n") > 2):
        assert running.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    if whom == "its group":
        os.killpg(running.pid, signal.SIGINT)
    else:
        running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=120)
    assert running.returncode == 130, said
    assert f"'moxie compare --resume --out {out}' goes on" in said.splitlines()[-1]
    assert list((out / "bf16-seed1" / "checkpoints").iterdir())
    if whom == "its group":
        return
    done = json.loads(again(out, "--json").stdout)
    whole = json.loads(compare(tmp_path / "whole", "--json", **changed).stdout)
    assert [r["eval_loss"] for r in done["recipes"]] == [r["eval_loss"] for r in whole["recipes"]]


def test_nothing_is_written_through_links_of_the_folder(copy, tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "elsewhere").mkdir()
    for name in ("report.html", "report.html.unfinished", "compare.json"):
        (copy / name).unlink(missing_ok=True)
        (copy / name).symlink_to(tmp_path / "mine")
    assert "Report: " in again(copy).stdout
    assert (tmp_path / "mine").read_text() == "mine"
    if (copy / "pictures").exists():
        shutil.rmtree(copy / "pictures")
        (copy / "pictures").symlink_to(tmp_path / "elsewhere")
        assert "it is a link" in again(copy).stderr
    shutil.rmtree(copy / "bf16-seed1")
    (copy / "bf16-seed1").symlink_to(tmp_path / "elsewhere")
    assert "it is a link" in again(copy, code=1).stderr
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_report_leaves_out_lines_that_no_run_writes(copy):
    with open(copy / "bf16-seed1/metrics.jsonl", "a") as file:
        file.write("[" * 200000 + "\n[1]\n" + '{"event": 3}\n')
    done = again(copy)
    assert "lines that no run writes" in done.stderr and "Report: " in done.stdout


# ---- verdicts and bad input --------------------------------------------------------------------


def test_require_is_on_the_upper_end_of_the_interval(copy):
    high = json.loads((copy / "compare.json").read_text())["recipes"][1]["interval_percent"][1]
    again(copy, require=high + 0.1)
    done = again(copy, f"--require={high - 0.1}", code=1)
    assert "not as required: the loss of mxfp8_rceil may be" in done.stderr and "0.10 % more" in done.stderr
    assert "mxfp8_rceil " in done.stdout and "Report: " in done.stdout


def test_require_learned_is_about_the_bigram_entropy(copy):
    done = again(copy, "--require-learned", code=1)
    assert "the loss of bf16 is" in done.stderr and "not below the bigram entropy" in done.stderr


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"recipes": ["bf16", "mxfp8_rceli"]}, "mxfp8_rceli"),
        ({"recipes": ["bf16", "experts=mxfp8_rceli"]}, "mxfp8_rceli"),
        ({"recipes": ["bf16", "no.such.module=mxfp8_rceil"]}, "is called 'no.such.module'"),
        ({"recipes": ["bf16", "expert=mxfp8_rceil+linears=bf16"]}, "is called 'expert'"),
        ({"recipes": ["bf16", "re:(=mxfp8_rceil"]}, "is no regular expression"),
        ({"recipes": ["bf16", "bf16"]}, "'bf16' and 'bf16' would both be trained in"),
        ({"seeds": 0}, "--seeds must be 1 to 1000, got 0"),
        ({"seeds": 1, "require": 1}, "--require needs the interval of at least 2 --seeds, got 1"),
        ({"dim": 0}, "--dim must be 1 to"),
        ({"seed": 3}, "--seed"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_bad_input_is_refused_before_anything_is_trained(tmp_path, changed, message):
    done = compare(tmp_path / "out", code=2, **changed)
    assert message in done.stderr + done.stdout
    assert not list(tmp_path.glob("out/*-seed*"))


def test_a_folder_is_resumed_only_when_asked_and_as_it_began(copy, tmp_path):
    assert "--resume continues it" in compare(copy, code=2).stderr
    assert "--dim is not what the comparison in" in again(copy, code=2, dim=64).stderr
    assert "--eval-windows is not what" in again(copy, code=2, eval_windows=4).stderr
    assert "there is no plan.json" in again(tmp_path / "nothing", code=2).stderr
    (copy / "plan.json").write_text("{")
    assert "plan.json" in again(copy, code=2).stderr


def test_help_says_what_there_is():
    text = run("compare", "--help").stdout
    for word in ("--recipes", "--seeds", "--require", "--resume", "--json", "--dim", "Examples:", "docs/COMPARE.md"):
        assert word in text
    for word in ("recipe", "seed", "title", "save-weights"):  # flags that differ between runs
        assert not re.search(rf"^ *--{word} ", text, re.MULTILINE)


def test_runs_on_other_text_are_not_compared(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "a").write_text("to be or not to be, that is the question. " * 300)
    compare(tmp_path / "out", data=[data], seeds=1)
    (data / "b").write_text("the quick brown fox jumps over the lazy dog. " * 300)
    done = again(tmp_path / "out", code=2, seeds=2)
    assert "bf16 of seed 2 read other text than bf16 of seed 1" in done.stderr
