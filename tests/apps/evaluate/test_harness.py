"""lm-evaluation-harness by our adapter: the scores of its own hf backend, and the command."""

import json
import math
import sys
import types

import pytest

import meshwright.apps.evaluate
from meshwright.__main__ import main
from meshwright.generation import language_model

LENGTH = 32  # of conftest.py
TASKS = {
    "small_words": """
output_type: loglikelihood
doc_to_text: "{{text.split(' ')[:-1]|join(' ')}}"
doc_to_target: "{{' '+text.split(' ')[-1]}}"
metric_list: [{metric: perplexity}, {metric: acc}]
""",
    "small_choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: label
doc_to_choice: [" dog", " cat sat", " house and then slept near the fire while a dog ran around"]
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "small_rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    "small_answer": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: [" the", "."], max_gen_toks: 8}
metric_list: [{metric: exact_match, ignore_punctuation: true}]
""",
}


@pytest.fixture(scope="module")
def harness():
    pytest.importorskip(
        "lm_eval", reason="lm-eval is not installed: pip install 'meshwright[eval]'"
    )
    pytest.importorskip(
        "datasets", reason="datasets is not installed: pip install 'meshwright[eval]'"
    )
    from meshwright.apps.evaluate import harness

    return harness


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Tasks on local files."""
    folder = tmp_path_factory.mktemp("harness")
    text = "the cat sat on the mat while a small dog ran around the old house and then slept near the warm fire"
    known = text.split()
    words = [known[i * 7 % len(known)] for i in range(len(known))]  # as the model has learnt them
    lines = [
        {
            "text": " ".join(words[i:] + words + words[:i]),
            "question": " ".join(words[i : i + 4]),
            "answer": words[i],
            "label": i // 3 % 3,
        }
        for i in range(0, 18, 3)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, body in TASKS.items():
        files = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/data.jsonl}}}}\ntest_split: test"
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{files}\n{body}")
    return folder


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.getbasetemp() / "datasets"))


@pytest.mark.filterwarnings("ignore")
def test_scores_equal_the_harness_own_backend(harness, trained, exported, folder, tmp_path):
    """On the exported folder, with contexts and answers longer than the model reads."""
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    theirs = evaluator.simple_evaluate(
        HFLM(pretrained=str(exported), device="cpu", batch_size=4, max_length=LENGTH),
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(folder)),
        bootstrap_iters=0,
    )
    results = tmp_path / "results.json"
    flags = [
        "--harness",
        ",".join(TASKS),
        "--harness-path",
        folder,
        "--results-path",
        results,
        "--device=cpu",
    ]
    assert main(["evaluate", str(trained), *map(str, flags)]) == 0
    ours = {r["task"]: r["values"] for r in json.loads(results.read_text())}
    assert set(ours) == set(TASKS)
    for name, values in theirs["results"].items():
        wanted = {
            k.removesuffix(",none"): v
            for k, v in values.items()
            if isinstance(v, float) and "stderr" not in k
        }
        assert wanted and {k: ours[name][k] for k in wanted} == pytest.approx(wanted, rel=1e-4), (
            name
        )
    assert (
        ours["small_words"]["acc"] > 0
        and ours["small_choice"]["acc"] > 0
        and ours["small_answer"]["exact_match"] <= 1
    )


@pytest.mark.flag("harness harness_path num_fewshot")
@pytest.mark.filterwarnings("ignore")
def test_the_command(harness, trained, folder, capsys):
    flags = [
        "--harness=small_words,small_choice",
        f"--harness-path={folder}",
        "--limit=2",
        "--num-fewshot=1",
    ]
    assert main(["evaluate", str(trained), "--device=cpu", "--json", *flags]) == 0
    results = [
        json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")
    ]
    found = {(r["task"], r["samples"], r["few_shot"]) for r in results}
    assert found == {("small_words", 2, 1), ("small_choice", 2, 1)}
    assert (
        main(
            [
                "evaluate",
                str(trained),
                "--device=cpu",
                "--harness=small_wrods",
                f"--harness-path={folder}",
            ]
        )
        == 65
    )
    assert "--harness small_wrods: the harness has no such task" in capsys.readouterr().err


@pytest.fixture
def small_harness(monkeypatch):
    """A package in the place of lm-eval, whose evaluation asks for one log-likelihood."""
    asked = [(("the cat", " sat"), [1, 2], [3])]

    def simple_evaluate(adapter, tasks, **more):
        adapter._loglikelihood_tokens(asked)
        return {
            "results": {"small": {"acc,none": 1.0, "perplexity,none": simple_evaluate.perplexity}},
            "n-shot": {},
            "versions": {},
        }

    simple_evaluate.perplexity = 3.0
    package = {
        name: types.ModuleType(name) for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model")
    }
    package |= {
        name: types.ModuleType(name)
        for name in ("lm_eval.models", "lm_eval.models.utils", "lm_eval.tasks")
    }
    hook = types.SimpleNamespace(add_partial=lambda *a: None)
    package["lm_eval.api.model"].TemplateLM = type("TemplateLM", (), {"cache_hook": hook})
    package["lm_eval.models.utils"].normalize_gen_kwargs = None
    package["lm_eval.tasks"].TaskManager = lambda include_path: types.SimpleNamespace(
        match_tasks=lambda names: names
    )
    package["lm_eval"].evaluator = types.SimpleNamespace(simple_evaluate=simple_evaluate)
    for name, module in package.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "meshwright.apps.evaluate.harness", raising=False)
    monkeypatch.delattr(meshwright.apps.evaluate, "harness", raising=False)
    yield simple_evaluate
    sys.modules.pop("meshwright.apps.evaluate.harness", None)


@pytest.mark.parametrize("what", ["nothing", "weights", "perplexity"])
def test_an_accuracy_does_not_hide_what_is_not_finite(
    small_harness, trained, monkeypatch, capsys, what
):
    """An accuracy compares numbers that are not finite as if they were."""
    load = language_model.load_model

    def damaged(*args, **layout):
        found = load(*args, **layout)
        found.model.ln_f.weight.fill_(math.nan)
        return found

    if what == "weights":
        monkeypatch.setattr(language_model, "load_model", damaged)
    if what == "perplexity":
        small_harness.perplexity = math.inf
    status = main(["evaluate", str(trained), "--device=cpu", "--json", "--harness=small"])
    out, err = capsys.readouterr()
    assert status == (0 if what == "nothing" else 70) and ('"acc": 1.0' in out) == (
        what == "nothing"
    )
    said = {
        "nothing": "",
        "weights": "the loss is not finite",
        "perplexity": "perplexity of small is not finite",
    }
    assert said[what] in err


def test_without_the_package(trained, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "meshwright.apps.evaluate.harness", raising=False)
    monkeypatch.delattr(meshwright.apps.evaluate, "harness", raising=False)
    assert main(["evaluate", str(trained), "--device=cpu", "--harness=any"]) == 2
    assert "--harness needs lm-evaluation-harness" in capsys.readouterr().err


def test_a_harness_without_results_measures_nothing_else(trained, monkeypatch, capsys):
    empty = types.ModuleType("meshwright.apps.evaluate.harness")
    empty.score_harness = lambda m, folder, **more: iter(())
    monkeypatch.setitem(sys.modules, "meshwright.apps.evaluate.harness", empty)
    monkeypatch.setattr(meshwright.apps.evaluate, "harness", empty, raising=False)
    assert main(["evaluate", str(trained), "--device=cpu", "--json", "--harness=any"]) == 65
    out, err = capsys.readouterr()
    assert out == "" and "nothing was measured; name other tasks" in err
