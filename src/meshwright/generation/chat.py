"""`meshwright chat`: a dialogue in the terminal, with answers shown as they are generated."""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.base.errors import UserError
from meshwright.base.hints import did_you_mean
from meshwright.config.fields import inner_type
from meshwright.config.flags import convert_value
from meshwright.config.grammar import unescape
from meshwright.config.schema import Sampling
from meshwright.generation.decoder import run_request
from meshwright.generation.dialogue import ASSISTANT, USER, Dialogue
from meshwright.generation.language_model import LanguageModel
from meshwright.generation.requests import Completion, Event, Request
from meshwright.generation.terminal import (
    Terminal,
    history_file,
    interruptible,
    line_editing,
    report_errors,
)

LONGEST_NAME = 11  # letters of a token in the table of /tokens, which fits 80 columns
LIKELIEST = 4  # likeliest tokens that /tokens shows beside the chosen one
QUOTES = '"""'  # begins and ends an input of several lines
COMMANDS = {
    "help": "list the commands",
    "reset": "forget all turns and begin anew",
    "undo": "take the last input and its answer back",
    "retry": "answer the last input again, with other random numbers",
    "system TEXT": "set the system prompt, or show it",
    "set NAME VALUE": "change a setting: ",
    "show": "show the settings, and how full the model's positions are",
    "tokens": "show the last answer's tokens, their probabilities and the likeliest others",
    "save FILE": "write the dialogue to a JSON file",
    "load FILE": "go on with a dialogue from a file",
    "quit": "leave, as Ctrl-D does",
}
# Names of /set -> fields of Sampling; the dialogue itself has those without one.
SETTINGS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "greedy": "greedy",
    "max_tokens": "out_seq_length",
    "stop": "",
    "seed": "",
}


@dataclass
class Chat:
    """A dialogue with a model, the flags of its answers, and the terminal that shows it."""

    model: LanguageModel
    dialogue: Dialogue
    options: Sampling
    stop: tuple[str, ...]
    seed: int
    words_to_leave: tuple[str, ...] = ()  # beside /quit
    terminal: Terminal = field(default_factory=Terminal)
    last: list[Event] = field(default_factory=list)  # of the last answer
    answers: int = 0
    inputs: int = 0  # that are not blank, commands included

    def run(self, keep_history: bool = True) -> None:
        """Answer inputs until the input ends."""
        if not self.terminal.is_person:
            while self.turn():
                pass
            return
        template = self.dialogue.template
        form = "no chat template: the model continues the text"
        if template:
            form = f"the chat template {template.path}"
        # Ranks that compute for this one do not hear of Ctrl-C in time to stop between two tokens.
        stops = "stops an answer"
        if self.model.sharded is not None:
            stops = "ends the program, which runs on several ranks"
        self.terminal.note(f"{form}. /help lists the commands; Ctrl-C {stops}, Ctrl-D leaves.")
        with line_editing(self.complete_word, history_file() if keep_history else None):
            while self.turn():
                pass

    def turn(self) -> bool:
        """Read an input and answer it, or obey a command; return False at the end."""
        try:
            line = self.read()
        except KeyboardInterrupt:
            if not self.terminal.is_person:
                raise
            self.terminal.note("\n(Ctrl-D or /quit leaves)")
            return True
        is_blank = line is None or not line.strip()
        self.inputs += not is_blank
        if line is None or line.strip() in ("/quit", "/exit", *self.words_to_leave):
            return False
        # // begins a text that itself begins with /.
        if line.startswith("/") and not line.startswith("//"):
            report_errors(lambda: self.obey(line[1:]), self.terminal.note)
            return True
        # An empty line of a person lets a plain text go on; in a pipe it only separates inputs.
        goes_on = line == "" and self.terminal.is_person and self.dialogue.is_open
        if not is_blank or goes_on:
            self.answer(line[1:] if line.startswith("//") else line)
        return True

    def read(self) -> str | None:
        """Return an input: a line, lines that end with backslashes, or those between quotes."""
        line = self.terminal.ask("> ")
        if line is None:
            return None
        if line.startswith(QUOTES):
            lines = [line.removeprefix(QUOTES)]
            while not lines[-1].endswith(QUOTES):
                more = self.terminal.ask(". ")
                if more is None:
                    break  # the end of the input ends the quotes too
                lines.append(more)
            return "\n".join(lines).removesuffix(QUOTES).strip("\n")
        while line.endswith("\\"):
            line = f"{line[:-1]}\n{self.terminal.ask('. ') or ''}"
        return line

    def answer(self, content: str) -> None:
        """Add an input and write its answer; what the model cannot read is taken back."""
        before = list(self.dialogue.turns)
        self.dialogue.add(USER, content)
        try:
            done = report_errors(self.generate, self.terminal.note)
        except KeyboardInterrupt:  # the second one, which may have come in the middle of a step
            if not self.terminal.is_person:
                raise
            self.model.decoders.clear()
            self.terminal.note("\n(stopped; the answer is not kept)")
            done = False
        if not done:
            self.dialogue.turns = before

    def generate(self) -> None:
        """Write an answer while it is generated, and add it to the dialogue."""
        d = self.dialogue
        left_out = d.left_out
        prompt = d.prompt(self.options.out_seq_length)
        if d.left_out > left_out:
            what = "turns" if d.template else "tokens of the text"
            self.terminal.note(
                f"(the model reads {d.positions:,} tokens: the oldest {d.left_out:,} {what} are left out)"
            )
        # Behind a template an answer is a text of its own; without one it continues the prompt.
        request = Request(
            prompt,
            self.options,
            seed=self.seed,
            stream=self.answers,
            stop=(*self.stop, *(d.template.stop if d.template else ())),
            logprobs=LIKELIEST,
            is_alone=bool(d.template),
        )
        text, self.last = Completion(d.tokenizer, request), []
        events = run_request(self.model, request)
        with interruptible(self.terminal.is_person and self.model.sharded is None) as is_stopped:
            for event in events:
                self.last.append(event)
                self.terminal.write(text.add(event))
                if is_stopped():
                    break
            # Closing frees the slot, before a second Ctrl-C is obeyed.
            events.close()
            self.terminal.write(f"{text.close()}\n")
        self.answers += 1
        d.add(ASSISTANT, text.text, text.ended)
        self.report_end(len(prompt) + len(self.last), is_stopped())

    def report_end(self, length: int, is_stopped: bool) -> None:
        """Say why an answer ended, unless it ended as answers do."""
        if not self.terminal.is_person:
            return
        d = self.dialogue
        go_on = "" if d.template else "; Enter goes on"
        if is_stopped:
            self.terminal.note(f"(stopped{go_on})")
        elif self.last[-1].finish == "length":
            why = "/set max_tokens allows more"
            if length >= d.positions:
                why = f"the model's {d.positions:,} positions are full"
            self.terminal.note(f"({len(self.last):,} tokens; {why}{go_on})")
        elif self.last[-1].token == d.tokenizer.eod and d.template is None:
            self.terminal.note("(the text ended; the next line begins another one)")

    # Commands

    def obey(self, line: str) -> None:
        """Run a command, typed without its slash."""
        name, _, words = line.strip().partition(" ")
        usages = {usage.split()[0]: usage for usage in COMMANDS}
        if name not in usages:
            hint = did_you_mean(name, usages) or "; /help lists the commands"
            raise UserError(f"unknown command /{name}{hint}; // sends a text that begins with /")
        usage = usages[name]
        words = words.strip()
        takes_words = " " in usage
        # /system shows what is set, and /set has a message of its own.
        needs_words = takes_words and name not in ("system", "set")
        if (needs_words and not words) or (words and not takes_words):
            raise UserError(f"/{usage}: {COMMANDS[usage]}")
        run: Callable[..., None] = getattr(self, f"do_{name}")
        run(words) if takes_words else run()

    def do_help(self) -> None:
        for usage, about in COMMANDS.items():
            more = ", ".join(SETTINGS) if usage.startswith("set ") else ""
            self.terminal.note(f"/{usage:15} {about}{more}")
        self.terminal.note(
            f"A line that ends with \\ goes on in the next one; {QUOTES} begins and ends several lines."
        )

    def do_reset(self) -> None:
        self.dialogue.reset()
        self.terminal.note("(forgot all turns)")

    def do_undo(self) -> None:
        taken = self.dialogue.undo()
        self.terminal.note(
            "(there is nothing to take back)" if taken is None else f"(took back: {taken})"
        )

    def do_retry(self) -> None:
        taken = self.dialogue.undo()
        if taken is None:
            raise UserError("(there is nothing to answer again)")
        self.answer(taken)

    def do_system(self, words: str) -> None:
        if words:
            self.dialogue.system = "" if words in ('""', "''") else unescape(words)
        self.terminal.note(f"system: {self.dialogue.system!r}")

    def do_set(self, words: str) -> None:
        # Also as `max-tokens=5`, which is how the flags are written.
        name, _, value = words.replace("=", " ", 1).partition(" ")
        name = name.replace("-", "_")
        value = value.strip()
        if not value or name not in SETTINGS:
            hint = did_you_mean(name, SETTINGS) if name else ""
            raise UserError(f"/set NAME VALUE changes {', '.join(SETTINGS)}{hint}")
        self.change(name, value)
        self.terminal.note(f"{name} {self.settings()[name]}")

    def change(self, name: str, value: str) -> None:
        """Give a setting a value; raise UserError if it cannot have it."""
        if name == "stop":
            words = [] if value.lower() == "none" else value.split()
            self.stop = tuple(map(unescape, words))
            return
        target = SETTINGS[name]
        kind = typing.get_type_hints(Sampling)[target] if target else int
        try:
            new = convert_value(inner_type(kind), value)
        except ValueError as error:
            raise UserError(f"{name}: {error}") from None
        if name == "seed":
            # The answers are counted anew, so that the same inputs get the same answers.
            self.seed = new
            self.answers = 0
            return
        options = dataclasses.replace(self.options, **{target: new})
        if problem := Request([0], options).problem():
            raise UserError(problem)
        self.options = options

    def settings(self) -> dict[str, object]:
        values: dict[str, object] = {}
        for name, target in SETTINGS.items():
            if target:
                values[name] = getattr(self.options, target)
        values["stop"] = " ".join(json.dumps(s, ensure_ascii=False) for s in self.stop) or "none"
        values["seed"] = self.seed
        return values

    def do_show(self) -> None:
        d = self.dialogue
        used = len(d.prompt(1)) if d.turns else 0
        rows: dict[str, object] = {
            "template": d.template.path if d.template else "none: the text goes on",
            "system": repr(d.system),
            "turns": len(d.turns),
            "tokens": f"{used:,} of {d.positions:,}",
            "step": f"{self.model.step:,}",
        }
        rows |= self.settings()
        for name, value in rows.items():
            self.terminal.note(f"{name:18} {value}")

    def do_tokens(self) -> None:
        if not self.last:
            raise UserError("(there is no answer yet)")
        for event in self.last:
            others = [(i, p) for i, p in event.top if i != event.token]
            chances = [(event.token, event.logprob), *others[: LIKELIEST - 1]]
            line = ""
            width = 22  # of the chosen token; the others stand closer together
            for i, logprob in chances:
                shown = f"{math.exp(logprob or 0.0):6.1%} {self.name_token(i)}"
                line += f"{shown:{width}} "
                width = 18
            self.terminal.note(line.rstrip())

    def name_token(self, i: int) -> str:
        t = self.dialogue.tokenizer
        if i == t.eod:
            return "the end"
        # As JSON, so that blanks and line breaks can be seen.
        name = json.dumps(t.decode([i]), ensure_ascii=False)
        if len(name) > LONGEST_NAME:
            return f"{name[: LONGEST_NAME - 1]}…"
        return name

    def do_save(self, words: str) -> None:
        path = Path(words).expanduser()
        self.dialogue.save(path)
        self.terminal.note(f"(wrote {len(self.dialogue.turns)} turns to {path})")

    def do_load(self, words: str) -> None:
        path = Path(words).expanduser()
        self.dialogue.load(path)
        self.terminal.note(f"(read {len(self.dialogue.turns)} turns from {path})")

    def complete_word(self, line: str) -> list[str]:
        """Return the words that may follow in a line."""
        if line.startswith("/set "):
            return list(SETTINGS)
        return [f"/{usage.split()[0]}" for usage in COMMANDS] if line.startswith("/") else []
