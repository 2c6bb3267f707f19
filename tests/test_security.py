"""Each sentence in the lists of SECURITY.md has tests; those of no other file are here."""

from __future__ import annotations

import json
import os
import re
import socket
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from faults import summary
from helpers import TINY_FLAGS, write_counting
from meshwright.__main__ import main
from meshwright.checkpoint import manifests, publish, steps
from meshwright.data.files.indexed import Indexed
from meshwright.data.loader import Samples
from meshwright.generation import templates
from meshwright.ranks import connect

ROOT = Path(__file__).parents[1]
HOSTILE = "test_hostile_files.py::test_hostile_files"
PAYLOADS = "test_hostile_files.py::test_their_payloads_work"
UNKNOWN_CLASS = "test_pickles.py::test_an_unknown_class_is_refused_by_name_and_only_trust_runs_it"

# For each statement, by its words in bold, the tests of its sentences in their order.
STATEMENTS = {
    "Our checkpoints hold no code.": [
        "test_security.py::test_a_step_is_safetensors_and_json",
        "test_security.py::test_a_step_is_safetensors_and_json",
        f"test_publish.py::test_a_manifest_cannot_name_files_outside_its_folder {HOSTILE}",
        f"test_native.py::test_memory_is_bounded test_publish.py::test_a_huge_manifest_is_not_read {HOSTILE}",
        "test_native.py::test_200_bit_flips_never_load",
    ],
    "Checkpoints of other programs are pickles, which are read as data.": [
        HOSTILE,
        f"test_pickles.py::test_plain_pickles {HOSTILE}",
        f"test_pickles.py::test_classes_of_known_packages_are_inert {UNKNOWN_CLASS}",
        "test_pickles.py::test_limits_of_time_and_memory",
        PAYLOADS,
        f"{UNKNOWN_CLASS} {HOSTILE}",
    ],
    "Folders of Hugging Face bring no code.": [
        HOSTILE,
        HOSTILE,
        f"test_huggingface.py::test_damaged_folders_and_names_that_lead_out {HOSTILE}",
    ],
    "Token files are checked before the first step.": [
        "test_data_faults.py::test_damaged_files_are_refused",
        "test_data_faults.py::test_damaged_files_are_refused test_indexed.py::test_truncated_everywhere",
        "test_loader.py::test_an_id_outside_the_vocabulary_names_sample_and_place",
        "test_security.py::test_a_cached_index_runs_nothing test_samples.py::test_damaged_caches_are_rebuilt",
    ],
    "Text is data.": [
        "test_data_faults.py::test_bad_lines",
        "test_preprocess.py::test_good_lines_of_any_shape_are_kept",
        "test_security.py::test_names_in_archives_are_no_paths",
        "test_text.py::test_a_small_file_that_unpacks_to_much",
        "test_written_samples.py::test_a_terminal_is_safe",
    ],
    "Vocabularies are data.": [
        "test_tokenizers.py::test_missing_flags_and_broken_files",
        "test_tokenizers.py::test_missing_flags_and_broken_files "
        "test_tokenizers.py::test_a_changed_file_in_a_run_folder_is_refused",
        "test_templates.py::test_a_bad_template_is_refused",
    ],
    "Configuration holds settings only.": [
        "test_flags.py::test_hostile_files",
        "test_flags.py::test_hostile_files test_deepspeed_config.py::test_unreadable",
        "test_lazy_config.py::test_anything_else_is_refused_soon "
        "test_lazy_config.py::test_imports_that_double_are_refused",
        "test_flags.py::test_words_of_whole_configurations test_deepspeed_config.py::test_refusals "
        "test_flags.py::test_all_problems_at_once",
    ],
    "A run folder is data.": [
        "test_report.py::test_any_other_damaged_line_is_an_error_that_names_it",
        "test_report.py::test_page test_watch_app.py::test_state_curves_and_samples",
        "test_watch_app.py::test_the_page_has_no_outside_resources_and_nothing_inline "
        "test_security.py::test_a_report_loads_nothing",
        "test_engines.py::test_the_command_is_read_back_word_for_word",
    ],
    "`meshwright serve` listens on this machine only, unless a key is set.": [
        "test_serve.py::test_megatrons_script test_serve.py::test_flags_that_make_no_sense",
        "test_limits.py::test_a_key",
        "test_limits.py::test_pages_of_other_origins test_limits.py::test_hosts_that_are_not",
        "test_limits.py::test_a_large_header_is_refused test_limits.py::test_a_large_body_is_refused_at_once "
        "test_limits.py::test_slow_clients_are_closed_and_nobody_waits_for_them "
        "test_limits.py::test_load_is_answered_or_refused_and_never_mixed_up "
        "test_limits.py::test_too_many_connections",
        "test_limits.py::test_malformed_requests_are_refused",
        "test_security.py::test_the_server_speaks_plain_http_and_logs_no_text",
        "test_security.py::test_the_server_speaks_plain_http_and_logs_no_text",
    ],
    "`meshwright watch` listens on this machine only.": [
        "test_security.py::test_the_live_page_is_this_machines",
        "test_watch_app.py::test_who_may_ask",
        "test_watch_app.py::test_who_may_ask",
        "test_watch_app.py::test_the_files_and_their_headers",
    ],
    "Nothing is sent or downloaded unless you ask for it.": [
        "test_security.py::test_training_opens_no_connection",
        "test_security.py::test_training_opens_no_connection",
        "test_data_commands.py::test_fetch_continues_where_it_was_cut "
        "test_data_commands.py::test_a_wrong_checksum_leaves_nothing",
        "test_tokenizers.py::test_a_name_is_downloaded_once_from_the_hub",
        "test_trackers.py::test_wandb",
    ],
    "Ranks trust the network between them.": [
        "test_security.py::test_the_store_of_one_machine_is_its_own",
        "test_security.py::test_the_store_of_one_machine_is_its_own",
        "test_security.py::test_only_readers_of_other_formats_know_pickle",
        "test_security.py::test_the_store_of_one_machine_is_its_own",
    ],
    "Code that you give is run with your rights.": [
        "test_extending.py::test_the_example_learns_and_continues",
        f"test_extending.py::test_the_block_is_used test_extending.py::test_the_data_are_used {PAYLOADS}",
    ],
    "Checksums are no signatures.": [
        "test_security.py::test_checksums_are_no_signatures",
        "test_security.py::test_checksums_are_no_signatures",
    ],
    "A model says what it has learned.": [
        "test_serve.py::test_texts_are_the_models",
        "test_serve.py::test_texts_are_the_models",
    ],
    "A chat template may take long.": [
        "test_security.py::test_a_template_may_loop",
        "test_security.py::test_a_template_may_loop test_templates.py::test_a_bad_template_is_refused",
    ],
    "A key is all that protects a server.": [
        "test_limits.py::test_a_key",
        "test_limits.py::test_a_client_that_leaves_the_queue",
    ],
}


def test_each_sentence_has_tests_that_exist() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    found: dict[str, int] = {}
    for block in text.split("\n\n"):
        if block.startswith("* "):
            for item in re.split(r"^\* ", block, flags=re.MULTILINE)[1:]:
                bold = re.match(r"\*\*(.*?)\*\*", item, re.DOTALL)
                assert bold, item
                plain = " ".join(item.replace("**", "").split())
                found[" ".join(bold[1].split())] = len(re.split(r"(?<=\.) (?=[A-Z`])", plain))
        else:  # a sentence belongs into a list, where it needs a test
            assert block.startswith(("#", "Meshwright trusts the machine", "Please report")), block
    assert found == {key: len(sentences) for key, sentences in STATEMENTS.items()}
    known = list(summary.existing_tests())
    for sentences in STATEMENTS.values():
        for name in " ".join(sentences).split():
            assert known.count(name) == 1, name


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[object]]:
    """The folder of a run with a report, and the connections that it asked for."""
    folder, asked = tmp_path_factory.mktemp("trained") / "run", list[object]()

    def refuse(*args: object, **more: object) -> Any:
        asked.append(args)
        raise OSError("no network here")

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((socket.socket, "connect"), (socket.socket, "connect_ex"), (socket, "getaddrinfo")):
            patch.setattr(owner, name, refuse)
        argv = [*TINY_FLAGS, "--tensorboard", "--train-iters=2", "--eval-iters=0", "--save", str(folder)]
        assert main(["train", *argv]) == 0
    return folder, asked


# Files


def is_tensor(entry: object) -> bool:
    return isinstance(entry, dict) and "data_offsets" in entry


def test_a_step_is_safetensors_and_json(trained: tuple[Path, list[object]]) -> None:
    files = list(steps.step_folder(trained[0], 2).iterdir())
    assert len(files) == 5
    for path in files:
        raw = path.read_bytes()
        size = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + size] if path.suffix == ".safetensors" else raw)
        assert path.suffix in (".safetensors", ".json") and isinstance(header, dict)
        ends = [entry["data_offsets"][1] for entry in header.values() if is_tensor(entry)]
        assert not ends or len(raw) == 8 + size + max(ends)  # nothing else is in it


class Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def test_a_cached_index_runs_nothing(tmp_path: Path) -> None:
    write_counting(tmp_path / "x", [30, 20, 10, 40])
    args = (Indexed(tmp_path / "x"), range(0, 4), 12, 8, 1)
    made = Samples(*args, cache_dir=tmp_path / "cache")
    good = [made.doc_idx.copy(), made.shuffle_idx.copy()]  # they are views of the files
    paths = list((tmp_path / "cache").glob("*.npy"))
    for path in paths:
        np.save(path, np.array([Payload(tmp_path / "marker")], dtype=object), allow_pickle=True)
    again = Samples(*args, cache_dir=tmp_path / "cache")
    assert paths and not (tmp_path / "marker").exists()
    assert np.array_equal(again.doc_idx, good[0]) and np.array_equal(again.shuffle_idx, good[1])
    for path in paths:
        np.load(path, allow_pickle=False)  # written anew
        assert b"marker" not in path.read_bytes()
    np.save(tmp_path / "again.npy", np.array([Payload(tmp_path / "marker")], dtype=object), allow_pickle=True)
    np.load(tmp_path / "again.npy", allow_pickle=True)
    assert (tmp_path / "marker").exists()  # the payload works


def test_names_in_archives_are_no_paths(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / "z.zip", "w") as pack:
        for name in ("../up.txt", "../../far.txt", f"{tmp_path}/absolute.txt"):
            pack.writestr(name, f"the text of {name}")
    argv = ["--input", f"{folder}/z.zip", "--output-prefix", f"{folder}/out", "--tokenizer-type", "ByteTokenizer"]
    before = {path for path in tmp_path.rglob("*")}
    assert main(["preprocess", *argv, "--workers=1"]) == 0
    new = {path for path in tmp_path.rglob("*")} - before
    assert new and all(str(path.relative_to(folder)).startswith("out_text_document") for path in new)
    assert len(Indexed(folder / "out_text_document")) == 3


def test_a_report_loads_nothing(trained: tuple[Path, list[object]]) -> None:
    page = (trained[0] / "report.html").read_text()
    assert "<h1>" in page
    assert not re.search(r"""(?:src|href|action|data)=["']?(?!data:|#)[^>]*//|@import|url\(""", page)


def test_checksums_are_no_signatures(tmp_path: Path) -> None:
    publish.write_step(tmp_path, 1, {"state.json": lambda write: write(b'{"step": 1}')})
    folder = steps.step_folder(tmp_path, 1)
    (folder / "state.json").write_bytes(b'{"step": 2}')
    with pytest.raises(manifests.DamagedCheckpoint):
        manifests.verify_step(folder, full=True)
    entry = publish.write_file(tmp_path / "other", lambda write: write(b'{"step": 2}'))
    (folder / manifests.MANIFEST).write_bytes(manifests.encode_manifest({"state.json": entry}))
    manifests.verify_step(folder, full=True)


def test_a_template_may_loop(tmp_path: Path) -> None:
    text = "{% for i in range(300) %}{% for j in range(300) %}x{% endfor %}{% endfor %}"
    assert len(templates.ChatTemplate(tmp_path / "x", text).render([{"role": "user", "content": "a"}])) == 90_000


# Network


def listening() -> set[str]:
    """Return the addresses that this process listens on, as in /proc/net/tcp."""
    inodes = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            inodes.add(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:
            continue
    out = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                out.add(fields[1])
    return out


def test_the_store_of_one_machine_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reaches the store reads and writes it; on one machine only its users do."""
    before, until = listening(), time.monotonic() + 20
    store = connect.connect_store("127.0.0.1", 0, True, until, "rank 0")
    assert listening() - before == {f"0100007F:{store.port:04X}"}
    store.set("secret", "1")
    other = connect.connect_store("127.0.0.1", store.port, False, until, "rank 0")
    assert other.get("secret") == b"1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # so that it is set back
    connect._choose_interface("127.0.0.1", store.port)
    names = dict((name, number) for number, name in socket.if_nameindex())
    assert os.environ["GLOO_SOCKET_IFNAME"] in names and "lo" in os.environ["GLOO_SOCKET_IFNAME"]


PICKLES = re.compile(
    r"\.(?:all_gather_object|gather_object|(?:broadcast|scatter|send|recv)_object_list)\(|\btorch\.load\("
    r"|^ *(?:import|from) (?:pickle|marshal|shelve|dill|cloudpickle|joblib)\b",
    re.MULTILINE,
)


def test_only_readers_of_other_formats_know_pickle() -> None:
    source = ROOT / "src" / "meshwright"
    found = {path.parent for path in source.rglob("*.py") if PICKLES.search(path.read_text())}
    assert found == {source / "checkpoint" / "foreign" / "pickle"}


def test_training_opens_no_connection(trained: tuple[Path, list[object]]) -> None:
    assert not trained[1]


def test_the_server_speaks_plain_http_and_logs_no_text(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("uvicorn")
    from serving.sites import site

    with site() as running:
        assert running.complete(prompt="confidential", max_tokens=12)["choices"][0]["text"] == "confidential"
        assert running.error(prompt="confidential", bogus="confidential")[0] == 400
        assert b"HTTP/1.1 200" in running.exchange(
            b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        )
    captured = capfd.readouterr()
    assert "confidential" not in captured.out + captured.err


def test_the_live_page_is_this_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    from meshwright.watch import app

    found = []

    async def serve(sockets: list[socket.socket]) -> None:
        found.extend(s.getsockname()[0] for s in sockets)

    fake = SimpleNamespace(serve=serve, should_exit=False)
    monkeypatch.setattr(app, "make_server", lambda *_: fake)
    monkeypatch.setattr(app, "make_app", lambda _: None)
    watcher = SimpleNamespace(start=lambda: None, stopping=SimpleNamespace(set=lambda: None))
    app.serve_page(watcher, 0, lambda port: None)  # type: ignore[arg-type]
    assert found == ["127.0.0.1"]
