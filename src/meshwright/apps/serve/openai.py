"""OpenAI's completions and chat: what a request asks for, and the JSON of the answer.

Texts may also be asked for with vLLM's `top_k`, `min_p` and `repetition_penalty`. A field that
would change the text and is not known here is refused by name, never passed over.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from meshwright.apps.serve.scheduler import QueuedRequest
from meshwright.base.errors import UserError
from meshwright.base.fields import Fields, Refusal
from meshwright.config.schema import Sampling
from meshwright.data.tokenizers import Tokenizer
from meshwright.generation.dialogue import SYSTEM, ChatTurn, Dialogue
from meshwright.generation.language_model import LanguageModel
from meshwright.generation.requests import Event, Request, Top
from meshwright.generation.templates import ChatTemplate
from meshwright.generation.text import TokenText

MOST_TEXTS = 128  # of one request
MOST_STOPS = 16
LONGEST_STOP = 200
MOST_LOGPROBS = 20
LONGEST_TOKEN = 512  # characters on average: no text of more fits, and it is not worth encoding
# Identifiers for OpenAI's own records; they never change an answer.
IDENTIFIERS = ("user", "safety_identifier", "prompt_cache_key", "metadata")
# Fields that would change the text, the values that ask for nothing, and why others are refused.
NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "logit_bias": (({},), "logits cannot be shifted"),
    "service_tier": (("auto", "default"), "there is one tier"),
    "store": ((False,), "nothing is stored"),
}
NO_SUFFIX = "the model continues a text and cannot fill in before a suffix"
NO_TOOLS = "a pre-trained model calls no tools"
CHAT_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "tools": (([],), NO_TOOLS),
    "tool_choice": (("none", "auto"), NO_TOOLS),
    "parallel_tool_calls": ((True, False), NO_TOOLS),
    "functions": (([],), NO_TOOLS),
    "function_call": (("none", "auto"), NO_TOOLS),
    "response_format": (({"type": "text"},), "answers are plain text"),
    "modalities": ((["text"],), "answers are plain text"),
    "audio": ((), "answers are plain text"),
    "prediction": ((), "tokens are generated one by one"),
    "reasoning_effort": (("none",), "the model does not think before it answers"),
    "verbosity": (("medium",), "the length is that of the model's own text; use max_tokens"),
    "web_search_options": ((), "the model cannot search"),
}
ROLES = ("system", "developer", "user", "assistant")


@dataclass(frozen=True)
class ServedModel:
    """A language model under its name, with the template of its dialogues."""

    model: LanguageModel
    name: str
    template: ChatTemplate | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end an answer in a dialogue."""
        return self.template.stop if self.template else ()


@dataclass(frozen=True)
class OpenAICall:
    """A request for texts, checked."""

    kind: Literal["text_completion", "chat.completion"]
    requests: list[Request]  # for each prompt `best_of` texts
    n: int
    best_of: int
    logprobs: int | None
    stream: bool
    usage: bool  # in a stream: as its last part
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def prompt_tokens(self) -> int:
        return sum(len(r.prompt) for r in self.requests[:: self.best_of])


# Reading


def read_completion(f: Fields, served: ServedModel) -> OpenAICall:
    prompts = encode_prompt_field(f.take("prompt"), served)
    echo = f.flag("echo")
    length = f.integer("max_tokens", 16, 0, 2**31 - 1)
    if not length and not echo:
        raise Refusal(
            "max_tokens 0 leaves nothing to do without echo; give at least 1", "max_tokens"
        )
    logprobs = f.integer("logprobs", None, 0, MOST_LOGPROBS)
    n = f.integer("n", 1, 1, MOST_TEXTS)
    best_of = f.integer("best_of", n, 1, MOST_TEXTS)
    f.only("suffix", ("",), NO_SUFFIX)
    stream, usage = read_stream(f)
    # The best are known only when all have ended, so a stream cannot choose.
    if best_of < n or (best_of > n and stream):
        raise Refusal(
            f"best_of {best_of} must be at least n ({n}), and equal to it in a stream", "best_of"
        )
    # Each prompt keeps the end that leaves room for its text.
    if reads_end_only(f):
        # The end of each prompt, with room for the text after it.
        prompts = [prompt[-max(1, served.model.seq_length - length) :] for prompt in prompts]
    requests = read_texts(f, served, prompts, best_of, length, ())
    # The best texts are those whose tokens are likeliest, which must be known to choose them.
    wanted = 0 if logprobs is None and best_of > n else logprobs
    requests = [dataclasses.replace(r, logprobs=wanted, echo=echo) for r in requests]
    return OpenAICall("text_completion", requests, n, best_of, logprobs, stream, usage)


def read_chat(f: Fields, served: ServedModel) -> OpenAICall:
    messages = read_messages(f.take("messages"))
    # The newer name of the length wins over the older one.
    lengths = [
        f.integer(name, None, 1, 2**31 - 1) for name in ("max_completion_tokens", "max_tokens")
    ]
    length = next((n for n in lengths if n is not None), None)
    most = served.model.seq_length
    ends_only = reads_end_only(f)
    prompt = render(messages, served, (length or most) if ends_only else None)
    room = max(1, most - len(prompt))
    if length is None:
        length = room
    elif ends_only:  # a long answer ends where the positions do
        length = min(length, room)
    wants = f.flag("logprobs")
    top = f.integer("top_logprobs", None, 0, MOST_LOGPROBS)
    if top is not None and not wants:
        raise Refusal("top_logprobs needs logprobs; set it to true", "top_logprobs")
    n = f.integer("n", 1, 1, MOST_TEXTS)
    for name, (neutral, why) in CHAT_NEUTRAL.items():
        f.only(name, neutral, why)
    stream, usage = read_stream(f)
    logprobs = (top or 0) if wants else None
    requests = read_texts(f, served, [prompt], n, length, served.stop)
    # A template writes an answer as a text of its own.
    is_alone = served.template is not None
    requests = [dataclasses.replace(r, logprobs=logprobs, is_alone=is_alone) for r in requests]
    return OpenAICall("chat.completion", requests, n, n, logprobs, stream, usage)


def reads_end_only(f: Fields) -> bool:
    """Return whether a prompt that leaves no room for the text is to lose its beginning."""
    if (truncation := f.text("truncation", "disabled")) not in ("auto", "disabled"):
        message = "must be auto, which leaves out old messages or a prompt's beginning, or disabled"
        raise Refusal(f"truncation {message}", "truncation")
    return truncation == "auto"


def read_texts(
    f: Fields,
    served: ServedModel,
    prompts: Sequence[list[int]],
    copies: int,
    length: int,
    stop: tuple[str, ...],
) -> list[Request]:
    """Return the requests of `copies` texts after each prompt; finish reading the fields."""
    if (name := f.text("model")) not in (None, served.name):
        message = f"there is no model {str(name)[:100]!r} here; this server has {served.name!r}"
        raise Refusal(message, "model", "model_not_found", 404)
    options = read_options(f, length)
    presence, frequency = (
        f.number(f"{name}_penalty", 0.0, -2, 2) for name in ("presence", "frequency")
    )
    # Without a seed each request draws its own, as a caller expects of chance.
    seed = f.integer("seed", secrets.randbits(31), -(2**63), 2**63 - 1)
    stop = tuple(dict.fromkeys((*f.strings("stop", MOST_STOPS, LONGEST_STOP), *stop)))
    for name, (neutral, why) in NEUTRAL.items():
        f.only(name, neutral, why)
    for name in IDENTIFIERS:
        f.take(name)
    # All known fields have been taken: any that is left might change the text.
    f.refuse_rest()
    if len(prompts) * copies > MOST_TEXTS:
        raise Refusal(
            f"n {copies} texts after {len(prompts)} prompts are too many; a request has at most {MOST_TEXTS}",
            "n",
        )
    most = served.model.seq_length
    for prompt in prompts:
        if len(prompt) + length > most:
            both = f"{len(prompt)} in the prompt and {length} in the completion"
            message = f"this model reads {most} tokens, but there are {both}; shorten one of them"
            raise Refusal(message, "prompt", "context_length_exceeded")
    # A row for each text, which draws random numbers of its own, by its place in the request.
    rows = [prompt for prompt in prompts for _ in range(copies)]
    first = Request(
        [], options, seed % 2**63, stop=stop, presence_penalty=presence, frequency_penalty=frequency
    )
    return [
        dataclasses.replace(first, prompt=prompt, stream=number)
        for number, prompt in enumerate(rows)
    ]


def read_options(f: Fields, length: int) -> Sampling:
    """Return the flags of sampling; OpenAI's `top_p` of 1 is all tokens, and 0 the likeliest."""
    temperature = f.number("temperature", 1.0, 0, 100)
    top_p = f.number("top_p", 1.0, 0, 1)
    # Our 0 takes all tokens, as OpenAI's 1; a tiny share leaves the likeliest alone.
    return Sampling(
        temperature,
        top_k=max(0, f.integer("top_k", 0, -1, 2**31 - 1)),  # -1: all, as in vLLM
        top_p=0.0 if top_p == 1 else top_p or 1e-12,
        min_p=f.number("min_p", 0.0, 0, 1),
        repetition_penalty=f.number("repetition_penalty", 1.0, 0.01, 100),
        out_seq_length=length,
    )


def read_stream(f: Fields) -> tuple[bool, bool]:
    stream = f.flag("stream")
    options = f.take("stream_options")
    if options is None:
        return stream, False
    if not isinstance(options, dict):
        raise Refusal("stream_options must be an object", "stream_options")
    if not stream:
        raise Refusal("stream_options needs stream; set it to true", "stream_options")
    inner = Fields(options)
    usage = inner.flag("include_usage")
    inner.only("include_obfuscation", (False,), "answers are not padded")
    inner.refuse_rest()
    return stream, usage


def encode_prompt_field(given: Any, served: ServedModel) -> list[list[int]]:
    """Return the tokens of each prompt: of text, of a list of texts, or ids in one or two lists."""
    if given is None:
        given = ""
    prompts = given if isinstance(given, list) and not _is_ids(given) else [given]
    if not 0 < len(prompts) <= MOST_TEXTS:
        raise Refusal(f"prompt has {len(prompts)} prompts; give 1 to {MOST_TEXTS}", "prompt")
    tokenizer = served.model.tokenizer
    vocab = served.model.model.vocab
    out = []
    for prompt in prompts:
        if isinstance(prompt, str):
            ids = encode_text(served, prompt)
        elif isinstance(prompt, list) and _is_ids(prompt):
            ids = prompt
            if wrong := [i for i in ids if not 0 <= i < vocab]:
                raise Refusal(
                    f"prompt has token id {wrong[0]}, which is outside of the vocabulary, 0 to {vocab - 1}",
                    "prompt",
                )
        else:
            raise Refusal(
                "prompt must be a string, a list of strings, or token ids in one or two lists",
                "prompt",
            )
        out.append(ids or [tokenizer.eod])  # an empty prompt begins a document
    return out


def _is_ids(value: Sequence[Any]) -> bool:
    return bool(value) and all(type(i) is int for i in value)


def require_size(served: ServedModel, characters: int) -> None:
    if characters > (most := LONGEST_TOKEN * served.model.seq_length):
        message = f"this model reads {served.model.seq_length} tokens, but a prompt has more than {most} characters"
        raise Refusal(f"{message}; shorten it", "prompt", "context_length_exceeded")


def encode_text(served: ServedModel, text: str) -> list[int]:
    require_size(served, len(text))
    try:
        return list(served.model.tokenizer.encode(text))
    except UserError as error:  # a vocabulary of bare ids reads numbers only
        raise Refusal(str(error), "prompt") from None


def read_messages(given: Any) -> list[dict[str, str]]:
    """Return the turns of a dialogue; a list of text parts is joined."""
    if not isinstance(given, list) or not given:
        raise Refusal("messages must be a list of at least one message", "messages")
    out = []
    for number, message in enumerate(given):
        where = f"messages[{number}]"
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise Refusal(f"{where} must have a role: {', '.join(ROLES)}", "messages")
        # A field that is null asks for nothing.
        more = {
            key
            for key, value in message.items()
            if key not in ("role", "content") and value is not None
        }
        if more:
            raise Refusal(
                f"{where} has {sorted(map(str, more))[0][:64]}, which is not supported; leave it out",
                where,
            )
        # The content is a text, or a list of parts, of which only those of text can be read.
        content = message.get("content")
        if isinstance(content, list):
            # A content in parts must be text throughout: images are not read, and not passed over.
            is_text = [
                isinstance(p, dict) and p.keys() == {"type", "text"} and p["type"] == "text"
                for p in content
            ]
            if not all(is_text):
                part = f"{where}.content[{is_text.index(False)}]"
                raise Refusal(
                    f'{part} must be {{"type": "text", "text": TEXT}}; only text is read',
                    "messages",
                )
            texts = [p["text"] for p in content]
            content = "".join(texts) if all(isinstance(text, str) for text in texts) else None
        if not isinstance(content, str):
            raise Refusal(f"{where} must have text as content", "messages")
        role = "system" if message["role"] == "developer" else message["role"]
        out.append({"role": role, "content": content})
    return out


def render(
    messages: list[dict[str, str]], served: ServedModel, most: int | None = None
) -> list[int]:
    """Return the tokens of a dialogue up to the answer, without a template as one plain text.

    Where there is no room for an answer of `most` tokens, the oldest messages are left out, as in
    `meshwright chat`.
    """
    tokenizer = served.model.tokenizer
    template = served.template
    # Before the text is encoded, which takes long for a large one.
    require_size(served, sum(len(m["content"]) for m in messages))
    # What the system says begins the dialogue, whichever turns are left out.
    system = "\n".join(m["content"] for m in messages if m["role"] == SYSTEM)
    turns = [ChatTurn(m["role"], m["content"]) for m in messages if m["role"] != SYSTEM]
    dialogue = Dialogue(tokenizer, template, served.model.seq_length, system, turns)
    try:
        if most is not None:
            return dialogue.prompt(most) or [tokenizer.eod]
        if template is not None:
            return template.encode(tokenizer, messages)
        return encode_text(served, dialogue.text) or [tokenizer.eod]
    except UserError as error:
        raise Refusal(str(error), "messages") from None


# Texts


@dataclass
class Token:
    id: int
    logprob: float | None
    top: Top
    offset: int  # the character in which it begins


@dataclass
class TextPart:
    """What a token adds to a text, or all of a text."""

    text: str = ""
    tokens: list[Token] = field(default_factory=list)  # only with log-probabilities
    finish: str | None = None


class ChoiceText:
    """A text while it comes, cut before a stop string."""

    def __init__(self, tokenizer: Tokenizer, request: Request) -> None:
        self.tokenizer = tokenizer
        self.request = request
        self._echoed, self._stream = TokenText(tokenizer), request.new_text(tokenizer)
        self._count = 0
        self._waiting: list[Token] = []
        self.whole = TextPart()
        self.generated = 0  # tokens, without those of an echoed prompt
        self.sum = 0.0  # of their log-probabilities

    def push(self, event: Event) -> TextPart:
        """Return what is certain of the text now; nothing after its end."""
        if self.whole.finish:
            return TextPart()
        self.generated += not event.echoed
        self._count += 1
        is_end = event.finish == "stop" and event.token == self.tokenizer.eod
        text = ""
        if not is_end:
            self._note(event)
            text = (self._echoed if event.echoed else self._stream).push(event.token)
        # The prompt and the text are decoded apart: no character reaches from one into the other.
        if event.echoed and self._count == len(self.request.prompt):
            text += self._echoed.flush()
        if event.finish or self._stream.stopped:
            self.whole.finish = "stop" if self._stream.stopped else event.finish
            text += self._stream.flush()
        self.whole.text += text
        # Tokens wait until their first character is certain; those of a stop string are dropped.
        keep_all = self.whole.finish and not self._stream.stopped
        certain = [t for t in self._waiting if keep_all or t.offset < len(self.whole.text)]
        self._waiting = self._waiting[len(certain) :]
        self.whole.tokens += certain
        return TextPart(text, certain, self.whole.finish)

    def _note(self, event: Event) -> None:
        if self.request.logprobs is None:
            return
        self.sum += 0.0 if event.echoed else event.logprob or 0.0
        if event.echoed:
            offset = self._echoed.begin_of(event.token)
        else:
            offset = self._echoed.decoded + self._stream.begin_of(event.token)
        self._waiting.append(Token(event.token, event.logprob, event.top, offset))

    @property
    def mean(self) -> float:
        return self.sum / max(1, self.generated)


def spell(tokenizer: Tokenizer, token: int) -> str:
    """Return a token as OpenAI writes it: text, or bytes where these are no whole characters."""
    raw = tokenizer.decode_bytes([token])
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def completion_logprobs(tokenizer: Tokenizer, tokens: Sequence[Token]) -> dict[str, Any]:
    tops: list[dict[str, float] | None] = []
    for t in tokens:
        # The first token of an echoed prompt follows nothing, so it has no probability.
        if t.logprob is None:
            tops.append(None)
            continue
        # The chosen token is added where it is not among the likeliest.
        top: dict[str, float] = {}
        for token, logprob in [*t.top, (t.id, t.logprob)]:
            top.setdefault(spell(tokenizer, token), logprob)
        tops.append(top)
    return {
        "tokens": [spell(tokenizer, t.id) for t in tokens],
        "token_logprobs": [t.logprob for t in tokens],
        "top_logprobs": tops,
        "text_offset": [t.offset for t in tokens],
    }


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[Token]) -> dict[str, Any]:
    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        return {
            "token": spell(tokenizer, token),
            "logprob": logprob,
            "bytes": list(tokenizer.decode_bytes([token])),
        }

    content = [
        {**entry(t.id, t.logprob), "top_logprobs": [entry(*pair) for pair in t.top]} for t in tokens
    ]
    return {"content": content, "refusal": None}


# Answers


def envelope(
    call: OpenAICall, served: ServedModel, choices: list[dict[str, Any]]
) -> dict[str, Any]:
    is_chat = call.kind == "chat.completion"
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{call.id}",
        "object": f"{call.kind}.chunk" if is_chat and call.stream else call.kind,
        "created": call.created,
        "model": served.name,
        "system_fingerprint": f"step-{served.model.step}",
        "choices": choices,
    }


def choice_of(
    call: OpenAICall, served: ServedModel, index: int, piece: TextPart, is_first: bool = False
) -> dict[str, Any]:
    """Return a text, or in a stream a part of it, as an element of `choices`."""
    out: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": piece.finish}
    tokenizer = served.model.tokenizer
    if call.kind == "text_completion":
        out["text"] = piece.text
        if call.logprobs is not None:
            out["logprobs"] = completion_logprobs(tokenizer, piece.tokens)
        return out
    if call.logprobs is not None:
        out["logprobs"] = chat_logprobs(tokenizer, piece.tokens)
    if call.stream:
        # The first part names the role, also if it has no text yet.
        delta = {"content": piece.text} if piece.text or is_first else {}
        out["delta"] = {"role": "assistant"} | delta if is_first else delta
    else:
        out["message"] = {"role": "assistant", "content": piece.text, "refusal": None}
    return out


def usage_of(call: OpenAICall, generated: int) -> dict[str, int]:
    total = call.prompt_tokens + generated
    return {
        "prompt_tokens": call.prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": total,
    }


async def answer_call(call: OpenAICall, served: ServedModel, job: QueuedRequest) -> dict[str, Any]:
    """Return the whole answer; of `best_of` texts those with the likeliest tokens."""
    texts = [ChoiceText(served.model.tokenizer, r) for r in call.requests]
    async for row, event in job.events():
        texts[row].push(event)
    choices: list[dict[str, Any]] = []
    for first in range(0, len(texts), call.best_of):
        # Of each prompt's texts the best n, or all in their order.
        rows: list[int] = list(range(first, first + call.best_of))
        if call.best_of > call.n:
            # The mean, so that short texts have no advantage.
            rows.sort(key=lambda row: -texts[row].mean)
        for row in rows[: call.n]:
            choices.append(choice_of(call, served, len(choices), texts[row].whole))
    return {
        **envelope(call, served, choices),
        "usage": usage_of(call, sum(t.generated for t in texts)),
    }


async def stream_call(
    call: OpenAICall, served: ServedModel, job: QueuedRequest
) -> AsyncGenerator[bytes, None]:
    """Yield the answer as server-sent events, each token's text as soon as it is certain."""
    texts = [ChoiceText(served.model.tokenizer, r) for r in call.requests]
    begun = set[int]()
    extra = {"usage": None} if call.usage else {}
    async for row, event in job.events():
        # A token that ends no character, or may begin a stop string, says nothing yet.
        piece = texts[row].push(event)
        # A token may end within a character, and so add nothing yet.
        if not (piece.text or piece.tokens or piece.finish):
            continue
        part = choice_of(call, served, row, piece, row not in begun)
        begun.add(row)
        yield sse({**envelope(call, served, [part]), **extra})
    if call.usage:
        yield sse(
            {**envelope(call, served, []), "usage": usage_of(call, sum(t.generated for t in texts))}
        )
    yield b"data: [DONE]\n\n"


def sse(value: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"
