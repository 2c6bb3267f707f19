"""`meshwright serve DIR`: answer OpenAI's and Megatron's requests for text, and show a page."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from meshwright.base.errors import UNAVAILABLE, UserError
from meshwright.cli.reading import ReadingCommand, ReadingTask
from meshwright.config import checks, flags
from meshwright.config.fields import flag
from meshwright.config.problem import Problem, SettingsError, stated
from meshwright.config.schema import READING, Logging, ReadConfig, TokenizerFlags

if TYPE_CHECKING:
    from meshwright.generation.language_model import CheckedModel, LanguageModel

SHORTEST_KEY = 8


@dataclass(frozen=True)
class Serve:
    """The server and its limits."""

    host: str = flag(
        "127.0.0.1",
        "address to listen on; others than this machine's own need --api-key-file",
        value="FORM",
    )
    port: int = flag(8000, "port to listen on (0: any free one)", bound=">=0")
    api_key: str | None = flag(
        None,
        "key that requests must send; --api-key-file keeps it out of the process list",
        value="FORM",
    )
    api_key_file: str | None = flag(None, "file with the key that requests must send", value="FILE")
    allowed_hosts: list[str] = flag(
        [], "names by which browsers may reach the server, beside localhost", value="FORM"
    )
    served_model_name: str | None = flag(
        None, "name of the model in requests (none: that of its folder)", value="FORM"
    )
    chat_template: str | None = flag(
        None,
        "Jinja file, or folder of a tokenizer, for dialogues; or plain",
        value="FORM",
        docs="generation",
    )
    slots: int = flag(16, "texts that are generated at once", "--max-num-seqs", bound=">0")
    queue: int = flag(64, "requests that may wait; more are answered with status 429", bound=">=0")
    max_body_size: int = flag(8 << 20, "largest body of a request, in bytes", bound=">0")
    read_timeout: float = flag(10.0, "seconds until a request must have arrived", bound=">0")
    request_timeout: float = flag(600.0, "seconds until an answer must be complete", bound=">0")

    @property
    def is_local(self) -> bool:
        """Whether only programs on this machine can connect."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def key(self) -> str | None:
        """Return the key, which may be in a file."""
        if self.api_key_file is None:
            return self.api_key
        try:
            return Path(self.api_key_file).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(
                f"{{api_key_file={self.api_key_file}}} cannot be read: {error}"
            ) from None


@dataclass(frozen=True)
class ServeConfig(ReadConfig):
    """Settings of `meshwright serve`."""

    serve: Serve = Serve()
    logging: Logging = Logging()

    USES: ClassVar[frozenset[str]] = frozenset(
        {f.name for group in (Serve, TokenizerFlags) for f in dataclasses.fields(group)}
        | (READING - {"micro_batch_size"})
    )

    def problems(self) -> list[Problem]:
        s = self.serve
        out = checks.reading_problems(self, "serve")
        if s.api_key is not None and s.api_key_file is not None:
            text = "{api_key} and {api_key_file} cannot be combined; give one"
            out.append(Problem(("api_key", "api_key_file"), text))
        if s.api_key is not None and not is_key(s.api_key):
            text = f"{{api_key}} must have at least {SHORTEST_KEY} letters and digits, no spaces"
            out.append(Problem(("api_key",), text))
        # Anyone who reaches the port could use the model.
        if not s.is_local and s.api_key is None and s.api_key_file is None:
            text = f"{stated(s, 'host')} lets other machines in; set {{api_key_file}}, or listen on 127.0.0.1"
            out.append(Problem(("host",), text))
        if s.port > 65535:
            out.append(Problem(("port",), f"{stated(s, 'port')} is above 65535"))
        return out


def is_key(key: str) -> bool:
    return len(key) >= SHORTEST_KEY and key.isascii() and key.isprintable() and " " not in key


ABOUT = "Answer requests for text: OpenAI's and Megatron's, and a page to try the model on."


def prepare_serve(parsed: flags.Parsed[ServeConfig], is_rank_0: bool) -> ReadingTask:
    c = parsed.config
    s = c.serve
    # A mistake in the key, or a missing package, is found before the model is loaded.
    key = s.key()
    if key is not None and not is_key(key):
        raise SettingsError(
            f"{{api_key_file={s.api_key_file}}} must hold a key of at least {SHORTEST_KEY} letters and digits"
        )
    # A missing package is found before minutes go into loading a model.
    try:
        # The extra `serve`, which a plain installation does not have.
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        message = f"serve needs {error.name}; install it with pip install 'meshwright[serve]'"
        raise UserError(message, UNAVAILABLE) from None

    from meshwright.generation.templates import choose_template

    # A template that is not the model's is found before its weights are read.
    def check(model: CheckedModel) -> None:
        choose_template(s.chat_template, model.tokenizer, model.saved.tokenizer_folder)

    def work(m: LanguageModel) -> None:
        from meshwright.apps.pages.guard import Limits
        from meshwright.apps.serve.app import run_server
        from meshwright.apps.serve.openai import ServedModel

        template = choose_template(s.chat_template, m.tokenizer, m.tokenizer_folder)
        name = s.served_model_name or Path(c.checkpoint.load or "").resolve().name
        limits = Limits(
            key, (s.host, *s.allowed_hosts), s.max_body_size, s.read_timeout, s.request_timeout
        )
        run_server(ServedModel(m, name, template), limits, s.slots, s.queue, sockets[0])

    @contextlib.contextmanager
    def listening() -> Iterator[None]:
        """Listen during the block, which begins before minutes go into loading a model."""
        with listen(s.host, s.port) as opened:
            sockets.append(opened)
            yield

    sockets: list[socket.socket] = []
    less = f"a smaller --slots (now {s.slots}) or --seq-length, or --bf16,"
    context = listening() if is_rank_0 else contextlib.nullcontext()
    return ReadingTask(work, less, "stdout", check, context=context, stops=True)


def listen(host: str, port: int) -> socket.socket:
    try:
        # A name may stand for an address of IPv6.
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=512)
    except OSError as error:
        message = (
            f"--host {host} --port {port} cannot be listened on: {error.strerror}; give others"
        )
        raise UserError(message, UNAVAILABLE) from None


main = ReadingCommand("serve", ServeConfig, ABOUT, "serving", prepare_serve).main
