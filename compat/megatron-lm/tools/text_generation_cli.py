"""Megatron-LM's client of its text generation server: `text_generation_cli.py HOST:PORT`.

Asks for prompts and lengths and sends them with PUT to /api, until the input ends (Ctrl-D). Ctrl-C
gives up one answer. Needs no installed package.
"""

import argparse
import http.client
import json
import os
import sys
from urllib.parse import urlsplit


def generate(address: str, prompt: str, tokens: int, api_key: str | None) -> str:
    """Return the text that the server answers; raise OSError or ValueError if there is none."""
    url = urlsplit(address if "://" in address else f"http://{address}")
    # Directly: a proxy of the environment is for other addresses.
    connect = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    connection = connect(url.hostname or "localhost", url.port)
    headers = {"Content-Type": "application/json"} | (
        {"Authorization": f"Bearer {api_key}"} if api_key else {}
    )
    try:
        body = json.dumps({"prompts": [prompt], "tokens_to_generate": tokens})
        connection.request("PUT", f"{url.path.rstrip('/').removesuffix('/api')}/api", body, headers)
        reply = connection.getresponse()
        raw = reply.read().decode("utf-8", "replace")
    except http.client.HTTPException as error:
        raise ValueError(f"{address} does not speak HTTP: {error!r}") from None
    finally:
        connection.close()
    try:
        answer = json.loads(raw)
    except ValueError:
        answer = raw.strip()
    if reply.status != 200:
        message = answer.get("message", answer) if isinstance(answer, dict) else answer
        raise ValueError(f"Error {reply.status}: {message}")
    return str(answer["text"][0])


def ask(question: str) -> str | None:
    """Return the line that is typed, or None where the input ends."""
    try:
        return input(question)
    except EOFError:
        print()
        return None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "address", metavar="HOST:PORT", help="of `meshwright serve`, for example localhost:5000"
    )
    parser.add_argument(
        "--api-key",
        default=os.environ.get("MESHWRIGHT_API_KEY"),
        help="key of a server that needs one",
    )
    args = parser.parse_args()
    while (prompt := ask("Enter prompt: ")) is not None:
        while (
            count := ask("Enter number of tokens to generate: ")
        ) is not None and not count.strip().isdecimal():
            print(f"{count!r} is not a whole number from 0")
        if count is None:
            break
        try:
            print("Megatron Response: ")
            print(generate(args.address, prompt, int(count), args.api_key), flush=True)
        except (OSError, ValueError, LookupError, TypeError) as error:
            print(f"{args.address}: {error}", file=sys.stderr)
            if not sys.stdin.isatty():
                return 1
        except KeyboardInterrupt:
            print()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print()
        sys.exit(130)
