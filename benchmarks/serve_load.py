"""Many clients of `meshwright serve` at once: who is answered, how fast, and with whose text.

usage: python benchmarks/serve_load.py DIR [--clients 64] [--requests 4] [--tokens 64]
           [-- flags of serve, such as --bf16 --slots 16 --queue 16]

Starts the server of a checkpoint on a free port of this machine. Every client has a prompt of its
own and asks for its greedy text, by turns whole and as a stream; a third of the streams leave after
a few tokens. Before, each prompt is asked for alone: every later answer must equal that text, or
part from it where the rounding of another number of rows decides, and be no other client's. A
client that is refused (429) waits as long as Retry-After says, at most --patience, and counts a
refusal. At the end the server must be idle and end with status 0 on SIGTERM.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import new_parser

SOURCE = Path(__file__).parents[1] / "src"
lock = threading.Lock()


class Client:
    """Requests to one server, and what came of them."""

    def __init__(self, port: int, tokens: int, patience: float, wanted: Sequence[str] = ()) -> None:
        self.port, self.tokens, self.patience, self.wanted = port, tokens, patience, wanted
        self.found: Counter[str] = Counter()
        self.seconds: list[float] = []  # of whole answers
        self.first: list[float] = []  # to the first token of a stream
        self.generated = 0

    def ask(
        self, prompt: list[int], stream: bool = False, leave_after: int | None = None
    ) -> tuple[int, str]:
        """Return the status and the text, or the seconds to wait."""
        began = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        body = {"prompt": prompt, "max_tokens": self.tokens, "temperature": 0, "stream": stream}
        try:
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
            )
            reply = connection.getresponse()
            if reply.status != 200:
                message = reply.read().decode()
                return reply.status, reply.getheader("retry-after", message)
            if not stream:
                answer = json.loads(reply.read())
                self.note(time.perf_counter() - began, answer["usage"]["completion_tokens"])
                return 200, answer["choices"][0]["text"]
            text, parts = "", 0
            for line in reply:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                text += json.loads(line[6:])["choices"][0]["text"]
                parts += 1
                if parts == 1:
                    with lock:
                        self.first.append(time.perf_counter() - began)
                if parts == leave_after:
                    return 0, text
            self.note(time.perf_counter() - began, parts)
            return 200, text
        finally:
            connection.close()

    def note(self, seconds: float, tokens: int) -> None:
        with lock:
            self.seconds.append(seconds)
            self.generated += tokens

    def compare(self, text: str, number: int, is_begun: bool) -> None:
        """Count a text that is not the one of this client's prompt alone.

        Rounding differs with the number of rows, so a text may part from its own; it must not be
        nearer to another client's.
        """
        wanted = self.wanted[number]
        if wanted.startswith(text) if is_begun else text == wanted:
            return
        near = [len(os.path.commonprefix([text, one])) for one in self.wanted]
        self.found["MIXED UP" if max(near) > near[number] else "rounded otherwise"] += 1

    def run(self, number: int, prompt: list[int], requests: int) -> None:
        for turn in range(requests):
            leaves = turn % 6 == 5
            while True:
                status, text = self.ask(
                    prompt, stream=bool(turn % 2), leave_after=3 if leaves else None
                )
                with lock:
                    self.found[
                        {0: "left", 200: "answered", 429: "refused"}.get(status, f"status {status}")
                    ] += 1
                    if status in (0, 200):
                        self.compare(text, number, leaves)
                if status != 429:
                    break
                time.sleep(min(self.patience, float(text)))


def metric(port: int, name: str) -> float:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    found = re.search(rf"^meshwright_{name} (\S+)$", text, re.M)
    assert found, name
    return float(found[1])


def percentiles(values: list[float]) -> str:
    if len(values) < 2:
        return "none"
    cut = statistics.quantiles(values, n=100, method="inclusive")
    return f"p50 {1e3 * cut[49]:,.1f} ms, p99 {1e3 * cut[98]:,.1f} ms ({len(values)})"


def main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("folder")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=4, help="of each client")
    parser.add_argument("--tokens", type=int, default=64, help="most new tokens of a request")
    parser.add_argument(
        "--patience", type=float, default=1.0, help="most seconds to wait after a refusal"
    )
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, rest = parser.parse_args(sys.argv[1:cut]), sys.argv[cut + 1 :]
    words = [
        sys.executable,
        "-m",
        "meshwright",
        "serve",
        args.folder,
        "--port=0",
        "--queue=16",
        *rest,
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")]),
    }
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout
        port = 0
        for line in server.stdout:
            if found := re.search(r"http://\S+:(\d+) ", line):
                port = int(found[1])
                print(line.rstrip())
                break
        threading.Thread(
            target=lambda: sys.stdout.writelines(server.stdout or ()), daemon=True
        ).start()
        try:
            ok = measure(args, port)
        finally:
            server.send_signal(signal.SIGTERM)
            began = time.perf_counter()
            status = server.wait(30)
        print(f"end: status {status} after {time.perf_counter() - began:.2f} s")
    return 0 if ok and status == 0 else 1


def measure(args: argparse.Namespace, port: int) -> bool:
    prompts = [[n + 1, n + 2, n + 1] for n in range(args.clients)]
    alone = Client(port, args.tokens, 0)
    wanted = []
    for prompt in prompts:
        status, text = alone.ask(prompt)
        assert status == 200, text
        wanted.append(text)
    print(
        f"alone: {percentiles(alone.seconds)}, {alone.generated / sum(alone.seconds):,.0f} tokens/s"
    )
    together, began = Client(port, args.tokens, args.patience, wanted), time.perf_counter()
    with ThreadPoolExecutor(args.clients) as pool:
        work = [
            pool.submit(together.run, n, prompts[n], args.requests) for n in range(args.clients)
        ]
        health = Client(port, 1, 0)
        while not all(w.done() for w in work):
            before = time.perf_counter()
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            connection.request("GET", "/health")
            assert connection.getresponse().read() == b'{"status":"ok"}'
            connection.close()
            health.seconds.append(time.perf_counter() - before)
            time.sleep(0.05)
        for w in work:
            w.result()
    wall = time.perf_counter() - began
    counts = ", ".join(f"{name} {n}" for name, n in sorted(together.found.items()))
    print(
        f"{args.clients} clients: {counts}; {wall:.2f} s, {together.generated / wall:,.0f} tokens/s"
    )
    print(f"  whole answer {percentiles(together.seconds)}")
    print(f"  first token  {percentiles(together.first)}")
    print(f"  /health      {percentiles(health.seconds)}")
    time.sleep(0.3)
    idle = metric(port, "texts_running") + metric(port, "requests_waiting")
    print(f"  left in the decoder and the queue: {idle:.0f}")
    return not idle and set(together.found) <= {"answered", "refused", "left", "rounded otherwise"}


if __name__ == "__main__":
    sys.exit(main())
