"""The dialogue: in a terminal and through pipes, its commands, its turns, and its chat template."""

import contextlib
import json
import os
import pty
import select
import shutil
import subprocess
import sys
import time

import pytest
from three_sentences import CAT, LENGTH

from meshwright.config.grammar import unescape
from meshwright.data import tokenizers
from meshwright.generation import terminal
from meshwright.generation.dialogue import ASSISTANT, USER, Dialogue
from meshwright.generation.templates import ChatTemplate


@pytest.fixture
def chat(program):
    """A function of the lines that are typed, and flags; it returns stdout's and stderr's lines."""

    def call(typed, *argv, status=0):
        got, out, err = program("chat", "--temperature=0", *argv, typed=typed)
        assert got == status, err
        return out.splitlines(), [line for line in err.splitlines() if "checkpoint" not in line]

    return call


# Through pipes


def test_lines_are_answered(chat):
    """Each line in gives its answer out; a text that has ended is followed by another one."""
    assert chat("the c\na d\n\n   \nein B\n") == (["at sat.", "og ran.", "är."], [])
    assert chat("") == ([], [])
    assert chat("the c") == (["at sat."], [])  # a last line without its end


def test_a_text_that_has_not_ended_goes_on(chat):
    """The next line is added to it, on a line of its own."""
    out, err = chat("the c\n/set max_tokens 99\n/show\na\n", "--out-seq-length=3")
    assert out[0] == "at " and f"tokens             {len('the cat ')} of {LENGTH}" in err
    assert out[1:] == chat("the cat \\\na\n")[0]


def test_several_lines_make_one_input(chat):
    assert (
        chat('the\\\n c\n/reset\n"""the\n c"""\n/reset\n"""\nthe\n c\n"""\n')[0]
        == chat("the\\\n c\n")[0] * 3
    )
    assert chat('"""the c')[0] == ["at sat."]  # the input ended first
    assert chat("//\n/quit\nthe c\n")[1] == []


def test_settings_are_changed(chat):
    typed = "/set temperature 3\n/set max-tokens=4\n/set stop x \\n\n/set seed 5\n/set top_p .5\n/set greedy true\n/show\n"
    _, err = chat(typed)
    assert err[:6] == [
        "temperature 3.0",
        "max_tokens 4",
        'stop "x" "\\n"',
        "seed 5",
        "top_p 0.5",
        "greedy True",
    ]
    shown = dict(line.split(maxsplit=1) for line in err[6:])
    assert (
        shown["stop"] == '"x" "\\n"'
        and shown["turns"] == "0"
        and shown["template"].startswith("none")
    )
    assert chat("/set stop sat\nthe c\n/set stop none\n/reset\nthe c\n")[0] == ["at ", "at sat."]


MISTAKES = {
    "/set temperature -1": "temperature -1 must not be below 0",
    "/set temperature warm": "temperature: 'warm' is not a number",
    "/set top_p 2": "top_p 2",
    "/set max_tokens 0": "must be above 0",
    "/set temprature 1": "did you mean temperature?",
    "/set": "/set NAME VALUE changes temperature",
    "/sav x": "unknown command /sav; did you mean save?",
    "/nothing": "/help lists the commands; // sends a text that begins with /",
    "/save": "/save FILE: write the dialogue to a JSON file",
    "/reset x": "/reset: forget all turns",
    "/load none.json": "none.json: No such file or directory",
    "/tokens": "there is no answer yet",
    "/retry": "there is nothing to answer again",
    "x" * LENGTH: "left out",
}


def test_a_mistake_does_not_end_the_dialogue(chat):
    out, err = chat("".join(f"{line}\n" for line in MISTAKES) + "/reset\nthe c\n")
    said = "\n".join(err)
    assert out[-1] == "at sat." and [m for m in MISTAKES.values() if m not in said] == []


def test_undo_and_retry(chat):
    """The same input again has other random numbers, and the dialogue repeats with its seed."""
    out, err = chat("a d\nthe c\n/undo\n/show\n/undo\n/undo\n")
    assert "(took back: the c)" in err and "turns              2" in err
    assert err[-2:] == ["(took back: a d)", "(there is nothing to take back)"]
    typed = "/set temperature 3\na\n/retry\n/retry\n/show\n"
    out, err = chat(typed, "--out-seq-length=6")
    assert len(set(out)) == 3 and "turns              2" in err
    assert (
        out
        == chat(typed, "--out-seq-length=6")[0]
        != chat(typed, "--out-seq-length=6", "--seed=2")[0]
    )


def test_tokens_and_their_probabilities(chat):
    _, err = chat("the c\n/tokens\n")
    assert len(err) == len("at sat.") + 1 and all(
        " 9" in line[:3] or "100" in line[:3] for line in err
    )
    assert (
        err[0].split()[1] == '"a"'
        and err[-1].startswith(" 9")
        and "the end" in err[-1].split("%")[1]
    )
    shares = [float(word.strip().split()[-1]) for word in err[0].split("%")[:-1]]
    assert shares == sorted(shares, reverse=True) and len(shares) == 4 and max(map(len, err)) <= 79


def test_a_dialogue_is_saved_and_goes_on(chat, tmp_path):
    file = tmp_path / "d.json"
    chat(f"/system be brief\na d\n/save {file}\n")
    messages = json.loads(file.read_text())["messages"]
    assert [m["role"] for m in messages] == ["system", "user", "assistant"] and messages[2][
        "ended"
    ] is True
    assert messages[0]["content"] == "be brief" and messages[1]["content"] == "a d"
    _, err = chat(f"/load {file}\n/show\n/system\n/save {file}\n")
    assert (
        "(read 2 turns from" in err[0]
        and "turns              2" in err
        and "system: 'be brief'" in err
    )
    assert json.loads(file.read_text())["messages"] == messages
    other = tmp_path / "other.json"
    other.write_text("[1]")
    out, err = chat(f"/load {other}\n/save {other}\nthe c\n")
    assert "message 1 is not a" in err[0] and "holds no dialogue; name another file" in err[1]
    assert out == ["at sat."] and other.read_text() == "[1]"
    other.write_text('[{"role": "user", "content": "the c"}]')
    assert "turns              1" in chat(f"/load {other}\n/show\n")[1]


@pytest.mark.flag("system chat.stop")
def test_stop_strings_and_the_systems_words(chat):
    assert chat("the c\n", "--stop", "s", "x")[0] == ["at "]
    _, err = chat('/system\n/system ""\n/system\n', "--system", "a\\n")
    assert err == ["system: 'a\\\\n'", "system: ''", "system: ''"]


def test_bytes_that_are_not_utf8(chat):
    assert chat("the c\udcff\n")[0] == chat("the c�\n")[0] != []
    assert chat("the c\n", "--system=\udcff")[0] == chat("the c\n", "--system=�")[0] != []


def test_half_a_character_in_a_file_does_not_end_the_dialogue(chat, tmp_path):
    file = tmp_path / "d.json"
    file.write_text(json.dumps([{"role": "user", "content": "a\ud800"}]))
    out, err = chat(f"/load {file}\nthe c\n")
    assert out == ["at sat."] and "message 1 has \\ud800, half a character; mend it" in err[0]


def test_generate_without_a_prompt_is_a_dialogue(program):
    """`stop` leaves it, as in earlier releases."""
    assert program("generate", "--greedy", typed="a dog\nthe c\n stop \nthe dog\n")[:2] == (
        0,
        " ran.\nat sat.\n",
    )
    assert program("generate", "--greedy", "--interactive", "--stop=r", typed="a dog\n")[:2] == (
        0,
        " \n",
    )


def test_flags_and_dry_run(program, tmp_path):
    status, out, err = program("chat", "--top_p=2", "--tensor-model-parallel-size=2")
    assert (
        status == 2
        and "--top_p 2 must be from 0 to 1" in err
        and "start 2 (meshwright launch" in err
    )
    status, out, err = program("chat", "--dry-run", f"--chat-template={tmp_path}")
    assert status == 65 and "holds neither chat_template.jinja nor" in err
    (tmp_path / "bad.jinja").write_text("{% if %}")
    status, out, err = program("chat", "--dry-run", f"--chat-template={tmp_path}/bad.jinja")
    assert status == 65 and "bad.jinja is no chat template: Expected an expression" in err
    assert "the flags fit step 150" in program("chat", "--dry-run")[1]


# Chat templates


@pytest.fixture
def template(tmp_path):
    """A template that shows all turns, in a folder; a full stop ends an answer."""
    (tmp_path / "chat_template.jinja").write_text(
        "{{ messages | map(attribute='content') | join('|') }}"
    )
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "."}')
    return tmp_path


@pytest.mark.flag("chat.chat_template")
def test_a_chat_template_is_used(chat, template):
    """It writes the prompt; its end token ends the answer and is not shown."""
    out, err = chat("the c\n\n/show\n", f"--chat-template={template}")
    assert out == ["at sat"] and f"template           {template / 'chat_template.jinja'}" in err
    assert f"tokens             {len('the c|at sat')} of {LENGTH}" in err
    assert chat("the c\n", "--chat-template=plain")[0] == ["at sat."]


def test_the_runs_own_template_is_found(program, run, template, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        shutil.copy(template / name, tmp_path / "run" / "tokenizer")
    status, out, err = program("chat", "--temperature=0", load=tmp_path / "run", typed="the c\n")
    assert (status, out) == (0, "at sat\n")


# The turns


def dialogue(template=None, positions=40):
    return Dialogue(tokenizers.Bytes(), template, positions)


def test_prompts_of_a_plain_dialogue():
    d = dialogue()
    d.system = "S"
    for role, content, ended in [
        (USER, "a", False),
        (ASSISTANT, "b", False),
        (USER, "", False),
        (ASSISTANT, "c", False),
    ]:
        d.add(role, content, ended)
    assert d.text == "S\nabc" and d.is_open
    d.add(USER, "d")
    assert bytes(d.prompt(5)) == b"S\nabc\nd" and d.left_out == 0
    d.add(ASSISTANT, "e", ended=True)
    assert not d.is_open
    d.add(USER, "f" * 50)
    assert bytes(d.prompt(5)) == b"S\n" + b"f" * 33 and d.left_out == 17
    assert len(d.prompt(1000)) == 30  # a quarter is kept for the answer


def test_the_oldest_turns_go_first():
    d = dialogue(ChatTemplate(None, "{{ messages | map(attribute='content') | join }}"))
    d.system = "S"
    for n in range(9):
        d.add(USER, str(n) * 4)
        d.add(ASSISTANT, "x" * n)
    d.add(USER, "last")
    assert (
        bytes(d.prompt(10))
        == b"S" + b"6666xxxxxx7777xxxxxxx8888xxxxxxxx"[-25:].lstrip(b"x") + b"last"
    )
    assert d.left_out == 14
    assert d.undo() == "last" and d.undo() == "8888" and d.left_out == 0
    d.reset()
    assert d.undo() is None and d.system == "S"


def test_escapes():
    assert unescape(r"a\nb\tc\\nd\x\\") == "a\nb\tc\\nd\\x\\"


def test_what_a_terminal_would_obey_is_hidden():
    assert "\033[2J\x9bK\r\a é\n\t".translate(terminal.HIDDEN) == "�[2J�K�� é\n\t"


# In a terminal

SLOWLY = """
import sys, time
import meshwright.generation.chat as chat
from meshwright.__main__ import main
run_request = chat.run_request
def slowly(*arguments):
    for event in run_request(*arguments):
        yield event
        time.sleep(0.2)
chat.run_request = slowly
sys.exit(main(["chat", *sys.argv[1:]]))
"""


class Typist:
    """A program in a terminal of its own, and what it shows."""

    def __init__(self, words, environment):
        self.main, side = pty.openpty()
        self.process = subprocess.Popen(
            words,
            stdin=side,
            stdout=side,
            stderr=side,
            env=environment,
            start_new_session=True,
            preexec_fn=control,
        )
        os.close(side)
        self.shown = ""

    def type(self, text):
        os.write(self.main, text.encode())

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.wait()
        os.close(self.main)

    def look(self, seconds):
        """Return whether something more was shown within this time."""
        more = ""
        if select.select([self.main], [], [], seconds)[0]:
            with contextlib.suppress(OSError):  # the end of a terminal, on Linux
                more = os.read(self.main, 4096).decode(errors="replace")
        self.shown += more
        return bool(more)

    def wait_for(self, text, seconds=60):
        """Return what is shown up to and including a text."""
        end = time.monotonic() + seconds
        while text not in self.shown:
            assert self.look(max(0, end - time.monotonic())), self.shown
        before, _, self.shown = self.shown.partition(text)
        return before + text


def control():
    """Make the terminal at stdin the one whose Ctrl-C reaches this process."""
    import fcntl
    import signal
    import termios

    # a suite in the background of a shell may ignore it
    signal.signal(signal.SIGINT, signal.SIG_DFL)

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.flag("history")
def test_in_a_terminal(run, tmp_path):
    """An answer appears bit by bit; Ctrl-C stops it and not the program; lines are kept."""
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path), "TERM": "xterm", "NO_COLOR": "1"}
    words = [sys.executable, "-c", SLOWLY, str(run), "--device=cpu", "--temperature=0"]
    with Typist(words, environment) as person:
        person.wait_for("Ctrl-D leaves.")
        person.wait_for("> ")
        person.type("the c\n")
        person.wait_for("at")
        person.type("\x03")
        stopped = person.wait_for("(stopped; Enter goes on")
        assert CAT[-2:] not in stopped
        person.wait_for("> ")
        person.type("\n")  # the text goes on
        rest = person.wait_for("(the text ended; the next line begins another one)")
        assert "sat." in rest
        person.wait_for("> ")
        person.type("half a line")
        person.wait_for("half a line")
        # Python may miss one just before it waits for a key
        while "(Ctrl-D or /quit leaves)" not in person.shown:
            assert person.process.poll() is None, person.shown
            person.type("\x03")
            # its echo comes at once, and a second one too early would end the program
            end = time.monotonic() + 5
            while "(Ctrl-D or /quit leaves)" not in person.shown and time.monotonic() < end:
                person.look(1)
        person.wait_for("(Ctrl-D or /quit leaves)")
        person.wait_for("> ")
        person.type("/set te\t 0.5\n")
        person.wait_for(" 0.5\r\ntemperature 0.5\r\n> ")
        person.type("\x04")
        assert person.process.wait(20) == 0
    kept = tmp_path / "meshwright" / "chat_history"
    assert kept.read_text().splitlines()[-2:] == ["the c", "/set temperature 0.5"]
    assert kept.stat().st_mode & 0o077 == 0
