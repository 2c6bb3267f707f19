"""From flags to data sets: three ways to name files, changing blends, several validation sets."""

import json
import math
import os
import resource
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from corpora import build_and_capture, data_config

from helpers import (
    TINY_FLAGS,
    blend_rule,
    captured_output,
    error_of,
    open_step,
    read_rows,
    write_counting,
)
from meshwright.__main__ import main
from meshwright.base.errors import IO, USAGE
from meshwright.base.files import allow_open_files
from meshwright.config import check_data, notices
from meshwright.config.data_paths import PathSet, TokenFiles, path_sets
from meshwright.config.flags import parse_settings
from meshwright.config.grammar import BlendStage
from meshwright.config.schema import Data, Logging, TrainConfig
from meshwright.data.blend import Blend, Chain, normalise, samples_needed
from meshwright.data.datasets import build_datasets, continue_datasets
from meshwright.data.files.indexed import Indexed
from meshwright.data.history import BlendHistory
from meshwright.data.loader import Loader, LoaderSpec, Mock, Samples
from meshwright.training.log.trackers import validation_tags

SEQ = 8


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for n, sizes in enumerate(([30] * 20, [50] * 10, [7] * 40, [90] * 9)):
        write_counting(tmp_path / f"p{n}", sizes, n * 1000)
    return tmp_path


def build(**given):
    config = data_config(**given)
    assert not check_data.data_problems(config.data, True)
    return build_and_capture(config, 5000)


def problems(**given):
    [message] = check_data.data_problems(Data(seq_length=SEQ, **given), True)
    return str(message)


# Flags


@pytest.mark.flag(
    "train_weighted_split_paths_path valid_weighted_split_paths_path test_weighted_split_paths_path"
)
def test_groups_from_a_file(files):
    """bigscience's form, one line in quotes; several lines are read too."""
    (files / "valid.txt").write_text('"X: 0.6 0:0.5 p0, 0.4 0:1 p1" "Y: p2"\n')
    (files / "train.txt").write_text('"T: p3"\n')
    [train, x, y] = path_sets(
        Data(
            valid_weighted_split_paths_path="valid.txt", train_weighted_split_paths_path="train.txt"
        )
    )
    assert train == PathSet("train", None, (TokenFiles("p3"),), "{train_weighted_split_paths_path}")
    assert x.sources == (TokenFiles("p0", 0.6, 0.0, 0.5), TokenFiles("p1", 0.4)) and y.sources == (
        TokenFiles("p2"),
    )
    (files / "test.txt").write_text('"Z: p1"\n')
    [_, z] = path_sets(
        Data(train_weighted_split_paths=["T: p3"], test_weighted_split_paths_path="test.txt")
    )
    assert z.key == "test/Z"
    (files / "valid.txt").write_text('"X: p0')
    message = problems(
        train_weighted_split_paths=["T: p3"], valid_weighted_split_paths_path="valid.txt"
    )
    assert (
        "valid.txt: No closing quotation; it holds what --valid-weighted-split-paths would, in quotes"
        in message
    )


@pytest.mark.flag("data_args_path per_split_data_args_path")
def test_paths_from_files(files):
    (files / "paths").write_text("0.7 p0\n0.3 p1\n")
    assert path_sets(Data(data_args_path="paths")) == [
        PathSet(
            split, None, (TokenFiles("p0", 0.7), TokenFiles("p1", 0.3)), "{data_args_path}", True
        )
        for split in ("train", "valid", "test")
    ]
    (files / "split.json").write_text(
        json.dumps({"train": ["0.7", "p0", 0.3, "p1"], "valid": "p2", "test": None})
    )
    assert path_sets(Data(per_split_data_args_path="split.json")) == [
        PathSet(
            "train",
            None,
            (TokenFiles("p0", 0.7), TokenFiles("p1", 0.3)),
            "{per_split_data_args_path}",
        ),
        PathSet("valid", None, (TokenFiles("p2"),), "{per_split_data_args_path}"),
    ]
    by_flags = build(data_path=["0.7", "p0", "0.3", "p1"])[0]
    by_file = build(data_args_path="paths")[0]
    assert all(np.array_equal(by_flags["train"][k], by_file["train"][k]) for k in range(40))
    apart = build(per_split_data_args_path="split.json")[0]
    assert (
        isinstance(apart["train"], Blend)
        and isinstance(apart["valid"], Samples)
        and apart["test"] is None
    )


def test_a_list_of_paths_is_text(files):
    (files / "p0.bin").write_bytes(b"\xff\xfe\xfd")
    assert "--data-args-path p0.bin is no UTF-8 text" in problems(data_args_path="p0.bin")


# Sets


@pytest.mark.flag("train_weighted_split_paths valid_weighted_split_paths test_weighted_split_paths")
def test_groups_are_ranges_of_documents(files):
    """Ends are round(share x documents), and every set is built for the same number of samples."""
    made, lines, notices = build(
        train_weighted_split_paths=["T: 0.75 0:0.73 p0, 0.25 0:1 p1"],
        valid_weighted_split_paths=["ONE: 0.5 0.73:1 p0, 0.5 0:0.33 p2", "TWO: p1"],
        test_weighted_split_paths=["LAST: 3 0:1 p2"],
    )
    assert notices == [] and list(made) == ["train", "valid/ONE", "valid/TWO", "test/LAST"]
    shares = [0.75, 0.25]
    parts = [
        Samples(Indexed(f"p{n}"), range(end), math.ceil(40 * shares[n] * 1.005), SEQ, 1234)
        for n, end in ((0, 15), (1, 10))
    ]
    for k, (which, number) in enumerate(zip(*blend_rule(shares, 40), strict=True)):
        assert made["train"][k].tolist() == parts[which][number].tolist()
    assert len(made["valid/ONE"]) == 12
    assert {made["valid/ONE"][k][0] // 1000 for k in range(12)} == {0, 2}
    alone = Samples(Indexed("p1"), range(10), 12, SEQ, 1234)
    assert all(np.array_equal(made["valid/TWO"][k], alone[k]) for k in range(12))
    alone = Samples(Indexed("p2"), range(40), 4, SEQ, 1234)
    assert all(np.array_equal(made["test/LAST"][k], alone[k]) for k in range(4))
    said = [
        (lines[n - 1].strip(), line.strip())
        for n, line in enumerate(lines)
        if "document indices" in line
    ]
    assert ("ONE:", "document indices in [15, 20) total of 5 documents") in said
    assert ("ONE:", "document indices in [0, 13) total of 13 documents") in said
    assert lines.count(" > building dataset index ...") == 3  # each pair of files once


def test_groups_beside_a_split(files):
    """They are further sets; those of --split stay as they are without them, if they have data."""
    groups = {"valid_weighted_split_paths": ["ONE: p2"], "test_weighted_split_paths": ["LAST: p3"]}
    alone, _, _ = build(data_path=["p0"], split="8,2,0")
    made, _, _ = build(data_path=["p0"], split="8,2,0", **groups)
    assert list(made) == ["train", "valid", "valid/ONE", "test/LAST"]
    for key, number in (("train", 40), ("valid", 12)):
        assert all(np.array_equal(made[key][k], alone[key][k]) for k in range(number))
    one = Samples(Indexed("p2"), range(40), 12, SEQ, 1234)
    assert all(np.array_equal(made["valid/ONE"][k], one[k]) for k in range(12))


def test_more_files_than_the_limit_of_open_ones(tmp_path):
    """Five stay open for each data set; the usual limit is 1,024."""
    prefixes = [
        write_counting(tmp_path / f"s{n}", [20] * 5, n * 100) or str(tmp_path / f"s{n}")
        for n in range(20)
    ]
    config = data_config(
        data_path=[word for prefix in prefixes for word in ("1", prefix)], split="1"
    )
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = max(map(int, os.listdir("/dev/fd"))) + 50
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, before[1]))
        with captured_output() as (_, notices):
            train = build_datasets(config, 30_000)["train"]
        assert len(train.parts) == 20 and notices == []
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_more_files_than_the_system_allows(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    words = "1,000 data sets need 5,000 open files, and a process here may open 4,096; raise that limit (ulimit -n"
    assert words in error_of(lambda: allow_open_files(5000, "1,000 data sets"), IO)


@pytest.mark.flag("multiple_validation_sets validation_set_names")
def test_multiple_validation_sets(files):
    (files / "other").mkdir()
    write_counting(files / "other" / "p1", [9] * 9)
    given = {"train_data_path": ["p0"], "valid_data_path": ["p1", "p2"]}
    joined = build(**given)[0]
    assert isinstance(joined["valid"], Blend)
    made = build(**given, multiple_validation_sets=True)[0]
    assert list(made) == ["train", "test", "valid/p1", "valid/p2"] and made["test"] is None
    alone = Samples(Indexed("p2"), range(40), 12, SEQ, 1234)
    assert all(np.array_equal(made["valid/p2"][k], alone[k]) for k in range(12))
    named = build(**given, multiple_validation_sets=True, validation_set_names=["a", "b"])[0]
    assert {"valid/a", "valid/b"} < set(named)
    numbers = build(
        train_data_path=["p0"], valid_data_path=["p1", "other/p1"], multiple_validation_sets=True
    )[0]
    assert {"valid/0", "valid/1"} < set(numbers)
    one = build(train_data_path=["p0"], valid_data_path=["p1"], multiple_validation_sets=True)[0]
    assert list(one) == ["train", "valid", "test"]


# Validation sets in full


def samples_of(dataset):
    return sorted(tuple(dataset[k].tolist()) for k in range(len(dataset)))


def test_full_validation_has_every_sample_once(files):
    given = {"train_data_path": ["p0"], "valid_data_path": ["p1", "p2"], "full_validation": True}
    made = build(**given)[0]["valid"]
    assert isinstance(made, Chain) and len(made) == (500 - 1) // SEQ + (280 - 1) // SEQ
    assert len(set(samples_of(made))) == len(made)
    # whose length is its own
    assert build(**given, dataloader_type="cyclic")[0]["valid"].__class__ is Chain
    apart = build(**given, multiple_validation_sets=True)[0]
    assert samples_of(made) == sorted(samples_of(apart["valid/p1"]) + samples_of(apart["valid/p2"]))
    assert len(build(data_path=["p0"], full_validation=True)[0]["valid"]) == (4 * 30 - 1) // SEQ
    for k in (-1, len(made)):
        with pytest.raises(IndexError):
            made[k]
    write_counting(files / "short", [5])
    _, _, [notice] = build(
        train_data_path=["p0"], valid_data_path=["p1", "short"], full_validation=True
    )
    assert "short has 5 tokens, less than one sample of 8 + 1, so it is left out" in notice


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("columns", [None, lambda n: slice(0, n // 2)])
def test_samples_that_fill_the_last_batch_are_masked(ranks, columns):
    data, seen, counted = Mock(50, 11, SEQ, 1), Counter(), 0
    for rank in range(ranks):
        spec = LoaderSpec(
            2, lambda _: 4, 50, rank=rank, ranks=ranks, columns=columns, at_end="mask"
        )
        for micro in islice(Loader(data, spec), 3):
            for batch in micro:
                counted += batch.unmasked
                assert batch.tokens.shape[1] == (4 if columns else SEQ)
                for row, k in enumerate(batch.sample_ids.tolist()):
                    weight = 1.0 if batch.loss_mask is None else float(batch.loss_mask[row].mean())
                    assert weight == (k < 11)
                    seen[k] += weight
    assert {k: n for k, n in seen.items() if n} == dict.fromkeys(
        range(11), 1
    ) and counted == 11 * SEQ


# A blend that changes


def sample_of(tokens):
    """Return the sample's identity: its file and which of its tokens it has."""
    return tuple(tokens.tolist())


def run_of(steps, begin, end, past, size=None, **given):
    """Return samples [begin, end) of a continued run, and the history for its checkpoint."""
    config = data_config(**{"split": "1", "train_iters": steps, **given})
    with captured_output() as (lines, _):
        data, history = continue_datasets(config, 50_000, past, begin)
    kept = BlendHistory.from_state(json.loads(json.dumps(history.state())))
    assert kept == history
    return [sample_of(data["train"][k]) for k in range(begin, end)], kept, data["train"], lines


def by_hand(files, segments, first_needs):
    """Return the expected samples and the use of each file; further epochs have seed + 1, ...

    `segments`: [(samples, {file: weight})]; `first_needs`: samples each file was first built for.
    """
    made, used, out = {}, Counter(), []

    def sample(name, k):
        indexed = Indexed(name)
        parts = made.setdefault(
            name, [Samples(indexed, range(len(indexed)), first_needs[name], SEQ, 1234)]
        )
        for n in range(100):
            if n == len(parts):
                epoch = (int(indexed.sizes.sum()) - 1) // SEQ
                parts.append(Samples(indexed, range(len(indexed)), epoch, SEQ, 1234 + n))
            if k < len(parts[n]):
                return sample_of(parts[n][k])
            k -= len(parts[n])
        raise AssertionError

    for samples, weights in segments:
        shares = np.array(normalise(list(weights.values())))
        for which in blend_rule((shares / shares.sum()).tolist(), samples)[0]:
            name = list(weights)[which]
            out.append(sample(name, used[name]))
            used[name] += 1
    return out, used


def test_a_run_with_two_changes_and_interruptions(files):
    """No sample comes twice and none is left out, wherever the run was interrupted."""
    for n, sizes in enumerate(([30] * 60, [50] * 40, [7] * 160, [90] * 36)):
        write_counting(files / f"p{n}", sizes, n * 10_000)
    one = ["0.7", "p0", "0.3", "p1"]
    two = ["0.2", "p0", "0.5", "p2", "0.3", "p3"]  # p1 is dropped, two are new
    three = ["0.5", "p1", "0.5", "p3"]  # p1 comes back
    got, state, _, _ = run_of(100, 0, 50, None, data_path=one)
    more, state, _, lines = run_of(100, 50, 61, state, data_path=two, blend_change_at="now")
    assert " > the blend changes at sample 50:" in lines
    got += more
    more, state, _, _ = run_of(100, 61, 90, state, data_path=two)  # no flag: the state remembers
    got += more
    # later than now
    more, state, _, _ = run_of(100, 90, 130, state, data_path=three, blend_change_at="110")
    got += more
    earlier = state
    # another order of the same
    more, state, data, _ = run_of(100, 130, 200, state, data_path=["1", "p3", "1", "p1"])
    got += more
    asked = {"p0": (200, 0.7), "p1": (200, 0.3), "p2": (150, 0.5), "p3": (150, 0.3)}
    needs = {name: samples_needed(*of) for name, of in asked.items()}
    wanted, used = by_hand(
        files,
        [
            (50, {"p0": 0.7, "p1": 0.3}),
            (60, {"p0": 0.2, "p2": 0.5, "p3": 0.3}),
            (90, {"p1": 0.5, "p3": 0.5}),
        ],
        needs,
    )
    assert got == wanted
    assert data.count_used(200) == used and sum(used.values()) == 200
    assert len(set(got)) == 200 and Counter(f"p{s[0] // 10_000}" for s in got) == used
    for n, name in enumerate(("p0", "p1", "p2", "p3")):  # the first ones of each order
        order = Samples(Indexed(name), range(len(Indexed(name))), needs[name], SEQ, 1234)
        assert [s for s in got if s[0] // 10_000 == n] == [
            sample_of(order[k]) for k in range(used[name])
        ]
    # from an earlier step, without a flag
    again, _, _, _ = run_of(100, 50, 200, earlier, data_path=three)
    assert again == wanted[50:]


STAGES = {
    "data_path": ["0.7", "p0", "0.3", "p1", "0", "p2"],
    "blend_stages": ["40%: 0.5 p1 0.5 p2", "70: 1 p0"],
}


@pytest.mark.flag("blend_stages")
def test_stages_are_blends_from_their_samples_on(files):
    """Any interruption, also within a stage, gives the same samples as none."""
    parts = [(40, {"p0": 0.7, "p1": 0.3}), (30, {"p1": 0.5, "p2": 0.5}), (30, {"p0": 1.0})]
    needs = {"p0": samples_needed(40, 0.7) + samples_needed(30, 1.0), "p2": samples_needed(30, 0.5)}
    needs["p1"] = samples_needed(40, 0.3) + samples_needed(30, 0.5)
    wanted, used = by_hand(files, parts, needs)
    got, state, data, lines = run_of(50, 0, 55, None, **STAGES)
    assert got == wanted[:55] and [phase.begin for phase in state.blends] == [0, 40, 70]
    assert any("blend from sample 40 on: 0.5 p1, 0.5 p2" in line for line in lines)
    for begin in (0, 40, 55, 70, 83):
        more, again, data, _ = run_of(50, begin, 100, state, **STAGES)
        assert more == wanted[begin:] and again == state
    assert data.count_used(100) == used
    in_tokens = STAGES | {"blend_stages": [f"{40 * SEQ} tokens: 0.5 p1 0.5 p2", "70 samples: p0"]}
    assert run_of(50, 55, 100, state, **in_tokens)[0] == wanted[55:]


def test_stages_in_tokens_follow_the_lengths_of_samples():
    """A stage begins with the first sample that is whole at so many tokens, or above."""
    flags = ["--seq-length=16", "--seq-length-schedule=0:4 2:8 4:16", "--global-batch-size=6"]
    words = [*TINY_FLAGS, *flags, "--micro-batch-size=1"]
    config = parse_settings(TrainConfig, words, "meshwright train").config
    lengths = [4] * 12 + [8] * 12 + [16] * 100
    for tokens in (1, 4, 5, 47, 48, 49, 56, 57, 144, 145, 160, 161, 1000):
        wanted = next(n for n in range(125) if sum(lengths[:n]) >= tokens)
        for begin, size in ((f"{tokens} tokens", 200), (wanted, 200)):
            stage = BlendStage.read(f"{begin}: 1 a")
            assert stage.first_sample(size, config.samples_with) == wanted, tokens
    # Without a schedule all have one length.
    assert TrainConfig(data=Data(seq_length=16)).samples_with(10**15 + 1) == 10**15 // 16 + 1


def test_other_stages_than_before_are_refused(files):
    _, state, _, _ = run_of(50, 0, 50, None, **STAGES)
    for stages in (
        STAGES["blend_stages"][:1],
        ["40: 0.6 p1 0.4 p2", "70: p0"],
        ["50%: 0.5 p1 0.5 p2", "70: p0"],
    ):
        message = error_of(
            lambda stages=stages: run_of(50, 50, 60, state, **STAGES | {"blend_stages": stages}),
            USAGE,
        )
        assert (
            "the stages are not the checkpoint's" in message
            and "blend from sample 40 on" in message
        )
    longer = STAGES | {"blend_stages": ["40: 0.5 p1 0.5 p2", "70: p0"]}
    assert run_of(90, 50, 100, state, **longer)[0] == run_of(50, 50, 100, state, **STAGES)[0]
    changed = {"data_path": ["1", "p1", "3", "p2"], "blend_change_at": "60"}
    assert [phase.begin for phase in run_of(50, 50, 100, state, **changed)[1].blends] == [0, 40, 60]
    message = error_of(
        lambda: run_of(50, 0, 9, None, **STAGES | {"blend_stages": ["80: p0", "70%: p1"]}), USAGE
    )
    assert "the stage from 70% on begins at sample 70, the blend before it at 80" in message


def test_further_epochs_follow_in_full(files):
    """p1 has 62 samples and gives 21 of the first 40; then all come from it."""
    first, state, _, _ = run_of(20, 0, 10, None, data_path=["0.5", "p0", "0.5", "p1"])
    more, state, data, _ = run_of(80, 10, 160, state, data_path=["p1"], blend_change_at="now")
    wanted, used = by_hand(
        files, [(10, {"p0": 0.5, "p1": 0.5}), (150, {"p1": 1.0})], {"p0": 21, "p1": 21}
    )
    assert first + more == wanted and used["p1"] == 155
    seen = [s for s in first + more if s[0] // 1000 == 1]
    assert len(set(seen[:62])) == len(set(seen[62:124])) == 62  # each epoch in full
    longer, _, _, _ = run_of(200, 10, 160, state, data_path=["p1"])
    assert longer == more  # a longer run has the same order: further samples come after it


def test_a_dropped_source_may_be_gone(files):
    _, state, _, _ = run_of(20, 0, 10, None, data_path=["0.5", "p0", "0.5", "p1"])
    _, state, _, _ = run_of(20, 10, 20, state, data_path=["p0"], blend_change_at="10")
    (files / "p1.bin").rename(files / "elsewhere")
    assert len(run_of(20, 20, 40, state, data_path=["p0"])[0]) == 20
    # an earlier step reads it again
    message = error_of(lambda: run_of(20, 5, 20, state, data_path=["p0"]))
    assert "p1.bin does not exist" in message


def test_files_that_moved_are_the_same(files):
    first, state, _, _ = run_of(20, 0, 10, None, data_path=["0.5", "p0", "0.5", "p1"])
    for end in (".bin", ".idx"):
        (files / f"p1{end}").rename(files / f"moved{end}")
    more, _, _, _ = run_of(20, 10, 40, state, data_path=["0.5", "p0", "0.5", "moved"])
    (files / "moved.idx").rename(files / "p1.idx"), (files / "moved.bin").rename(files / "p1.bin")
    assert first + more == by_hand(files, [(40, {"p0": 0.5, "p1": 0.5})], {"p0": 21, "p1": 21})[0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"data_path": ["0.6", "p0", "0.4", "p1"]},
            "p0 has the share 0.6, it had 0.5; p1 has the share 0.4, it had 0.5. Read",
        ),
        (
            {"data_path": ["p0"]},
            "not blended as in the checkpoint: p1 is not in it; p0 has the share 1, it had 0.5",
        ),
        ({"data_path": ["p0", "p1", "p2"]}, "p2 is new"),
        (
            {"data_path": ["p0"], "blend_change_at": "9"},
            "--blend-change-at 9: 10 samples are used already; give 10 (or now)",
        ),
        (
            {"data_path": ["1", "p0", "1", "p1"], "blend_change_at": "30"},
            "the blend given holds from sample 0 on already",
        ),
        (
            {"data_path": ["1", "p0", "9", "p1"], "split": "9,1,0", "blend_change_at": "now"},
            "p0: the training set has documents 0 to 18 of it, in the checkpoint 0 to 20; give the checkpoint",
        ),
    ],
)
def test_another_blend_is_refused(files, given, words):
    _, state, _, _ = run_of(20, 0, 10, None, data_path=["0.5", "p0", "0.5", "p1"])
    assert words in error_of(lambda: run_of(20, 10, 20, state, **given), USAGE)


def test_a_planned_change_can_be_taken_back(files):
    one = ["0.5", "p0", "0.5", "p1"]
    plain, state, _, _ = run_of(20, 0, 40, None, data_path=one)
    _, pending, _, _ = run_of(20, 10, 20, state, data_path=["p0"], blend_change_at="30")
    assert len(pending.blends) == 2
    got, back, _, _ = run_of(20, 20, 40, pending, data_path=one, blend_change_at="now")
    assert got == plain[20:] and [b.begin for b in back.blends] == [0]
    got, twice, _, _ = run_of(20, 20, 40, pending, data_path=["p1"], blend_change_at="25")
    assert [b.begin for b in twice.blends] == [0, 25]
    assert (
        run_of(20, 20, 40, pending, data_path=["p0"], blend_change_at="now")[1].blends[-1].begin
        == 30
    )


def test_a_checkpoint_without_a_history(files):
    message = error_of(
        lambda: run_of(20, 10, 20, None, data_path=["p0"], blend_change_at="now"), USAGE
    )
    assert "the checkpoint remembers no blend" in message
    assert run_of(20, 10, 20, None, data_path=["p0"])[1].blends[0].begin == 0


# Whole runs

FLAGS = [f for f in TINY_FLAGS if f not in ("--mock-data", "--vocab-size=64", "--train-iters=6")]
FLAGS += ["--vocab-size=4000", "--lr-decay-iters=6", "--seq-length=8"]


def test_each_validation_set_has_its_line(files, capsys):
    groups = ["--valid-weighted-split-paths", "ONE: 0.5 0.5:1 p0, 0.5 0:1 p2", "TWO: p3"]
    groups += ["--test-weighted-split-paths", "LAST: p2"]
    run = [
        "train",
        *FLAGS,
        "--train-iters=6",
        "--train-weighted-split-paths",
        "T: 1 0:0.5 p0, 1 0:1 p1",
        *groups,
    ]
    assert main([*run, "--save", "run", "--load", "run", "--keep-best"]) == 0
    out = capsys.readouterr().out
    end = " validation loss at the end of training for"
    for words in (
        " validation loss at iteration 3 on ONE",
        " validation loss at iteration 3 on TWO",
        f"{end} val data on ONE",
        f"{end} test data on LAST",
    ):
        assert out.count(f"{words} | lm loss value: ") == 1
    assert out.count("validation loss at") == 7
    found = [(r["iteration"], r["name"], r["set"]) for r in read_rows(files / "run", "validation")]
    sets = [(n, "validation", name) for n in (3, 6, 6) for name in ("ONE", "TWO")]
    assert found == [*sets, (6, "test", "LAST")]
    losses = [r["loss"] for r in read_rows(files / "run", "validation")]
    assert losses[0] != losses[1] and losses[2] != losses[3]
    state = open_step(files / "run", 6).state
    assert state["best_loss"] in (sum(losses[:2]) / 2, sum(losses[2:4]) / 2)
    used = read_rows(files / "run", "used")[-1]
    assert used["samples"] == {"p0": 12, "p1": 12} and used["consumed_samples"] == 24
    assert " > samples of each data set so far:           12 p0" in out


@pytest.mark.flag("full_validation")
def test_full_validation_is_the_mean_over_all(files):
    """--eval-iters and the batch size have no effect."""
    run = [
        "train",
        *FLAGS,
        "--train-iters=3",
        *"--train-data-path p0 --valid-data-path p2 --full-validation".split(),
    ]
    assert main([*run, "--run-dir", "a", "--save", "a"]) == 0
    load = [*run, "--skip-train", "--load", "a", "--eval-interval=1000"]
    assert main([*load, "--run-dir", "b", "--eval-iters=3"]) == 0
    assert main([*load, "--run-dir", "c", "--micro-batch-size=1", "--global-batch-size=1"]) == 0
    losses = [read_rows(files / name, "validation")[-1]["loss"] for name in "abc"]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


@pytest.mark.flag("blend_change_at")
def test_a_resumed_run_goes_on_with_its_blends(files, capsys):
    """Losses are bit-equal with interruptions; the state and config.toml hold the change."""
    run = ["train", *FLAGS, *"--train-iters=6 --split 1 --eval-iters=0 --save-interval=1".split()]
    one, two = ["--data-path", "0.5", "p0", "0.5", "p1"], ["--data-path", "0.2", "p0", "0.8", "p3"]
    saved = ["--save", "a", "--load", "a"]
    assert main([*run, *one, "--exit-interval=2", *saved]) == 0
    assert main([*run, *two, *saved]) == 2 and "--blend-change-at now" in capsys.readouterr().err
    assert main([*run, *two, *saved, "--blend-change-at=now"]) == 0
    assert 'blend_change_at = "8"' in (files / "a" / "config.toml").read_text()
    losses = [r["loss"] for r in read_rows(files / "a", "step")]
    assert main([*run, *two, "--save", "b", "--load", "a/iter_0000003"]) == 0
    assert [r["loss"] for r in read_rows(files / "b", "step")] == losses[3:]
    rows = (files / "a" / "metrics.jsonl").read_text()
    # a finished run refuses it too
    assert main([*run, *one, *saved]) == 2
    assert "are not blended as in the checkpoint" in capsys.readouterr().err
    assert (files / "a" / "metrics.jsonl").read_text() == rows
    assert open_step(files / "a", 6).state["blends"]["blends"][1][0] == 8
    assert main(["inspect", "a"]) == 0
    shown = "  blend from sample 0 on: 0.5 p0, 0.5 p1\n  blend from sample 8 on: 0.2 p0, 0.8 p3"
    assert shown in capsys.readouterr().out


def test_validation_on_training_data_is_reported():
    def reports(**given):
        return [
            line
            for line in notices.without_effect(data_config(**given))
            if "not of unseen text" in line
        ]

    group = {"train_weighted_split_paths": ["T: 1 0:0.9 a, 1 0:1 b"]}
    assert reports(**group, valid_weighted_split_paths=["V: 1 0.9:1 a, 1 0:1 c"]) == []
    [line] = reports(**group, valid_weighted_split_paths=["V: 1 0.8:1 a, 1 0:1 c"])
    assert line.startswith(
        "--valid-weighted-split-paths: a is in the training set too, with the same documents: this valid/V"
    )
    assert len(reports(train_data_path=["a"], valid_data_path=["a"], test_data_path=["a"])) == 2
    assert reports(data_path=["a"]) == reports(data_path=["1", "a", "2", "a"]) == []


def test_a_split_without_validation_is_reported():
    def reports(**given):
        return [
            line for line in notices.without_effect(data_config(**given)) if "validation" in line
        ]

    [line] = reports(data_path=["a"], split="100,0,0")
    assert (
        line
        == "--split 100,0,0 leaves nothing for validation, so there is none; raise its second number"
    )
    assert reports(data_path=["a"], split="1") and not reports(data_path=["a"])
    assert not reports(data_path=["a"], split="1", eval_iters=0)  # none is wanted
    assert not reports(data_path=["a"], split="1", mock_data=True)
    assert not reports(train_data_path=["a"], valid_data_path=["b"], split="1")


def test_each_set_has_its_own_tag():
    row = {"name": "validation", "set": "wiki", "loss": 2.0, "ppl": 7.5}
    shown = validation_tags(Logging(log_validation_ppl_to_tensorboard=True), row)
    tag = "lm-loss-validation/wiki/lm loss validation"
    assert shown == {tag: 2.0, f"{tag} ppl": 7.5}
