"""What a server's front end takes before its engine has a prompt: the two numbers ``frontend_*_us`` of the runtimes.

    pip install tokenizers==0.22.1 fastapi uvicorn aiohttp
    python benchmarks/frontend.py PATH/TO/tokenizer.json...

Prompts are made as benchmarking clients of servers make them: as many tokens as wanted that follow one another in the
vocabulary, as text. Turning them into tokens is told in seconds of the processor, the least of several turns with fresh
tokenizers, as other work on the machine hardly changes those; HTTP in seconds until the first event of a stream, the
least of many requests over connections of their own to a server that answers at once.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

TOKENS = (1024, 8192)
PROMPTS = 40
TURNS = 4
REQUESTS = 200
PORT = 8899


def prompts(tokenizer: Any, longest: int, rng: random.Random) -> list[str]:
    """Return texts of 0.8 to 1 times so many tokens."""
    size = tokenizer.get_vocab_size(with_added_tokens=False)
    made = []
    for _ in range(PROMPTS):
        length, first = rng.randint(int(0.8 * longest), longest), rng.randrange(size)
        text = tokenizer.decode([(first + i) % size for i in range(length)])
        made.append(tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids[:length]))
    return made


def tokenising(path: str, texts: list[str]) -> tuple[float, float]:
    """Return the mean number of tokens of texts, and the mean seconds that turning one into them takes."""
    from tokenizers import Tokenizer

    least, n_tokens = [float("inf")] * len(texts), 0
    for _ in range(TURNS):
        tokenizer, n_tokens = Tokenizer.from_file(path), 0
        for i, text in enumerate(texts):
            before_s = time.thread_time()
            n_tokens += len(tokenizer.encode(text, add_special_tokens=False).ids)
            least[i] = min(least[i], time.thread_time() - before_s)
    return n_tokens / len(texts), sum(least) / len(texts)


def serve_a_word() -> None:
    """Serve completions of one word, as a stream."""
    import uvicorn
    from fastapi import FastAPI
    from fastapi.responses import StreamingResponse
    from pydantic import BaseModel

    class Asked(BaseModel):
        model: str
        prompt: str
        max_tokens: int
        stream: bool

    async def events() -> AsyncIterator[str]:
        yield f"data: {json.dumps({'choices': [{'index': 0, 'text': 'word'}]})}\n\n"
        yield "data: [DONE]\n\n"

    async def complete(asked: Asked) -> Any:
        return StreamingResponse(events(), media_type="text/event-stream")

    # The annotation is a name of this function, which FastAPI would look for in the module.
    complete.__annotations__["asked"] = Asked
    app = FastAPI()
    app.post("/v1/completions")(complete)
    uvicorn.run(app, port=PORT, log_level="error")


async def first_event(text: str) -> float:
    """Return the seconds until the first event of a completion of a text."""
    import aiohttp

    asked = {"model": "m", "prompt": text, "max_tokens": 1, "stream": True}
    async with aiohttp.ClientSession() as session:
        before_s = time.perf_counter()
        async with session.post(f"http://127.0.0.1:{PORT}/v1/completions", json=asked) as response:
            async for line in response.content:
                if line.strip():
                    return time.perf_counter() - before_s
    raise RuntimeError("no event")


def main(paths: list[str]) -> None:
    """Print both for every vocabulary and length."""
    from tokenizers import Tokenizer

    # As in life, in a process of its own.
    multiprocessing.get_context("spawn").Process(target=serve_a_word, daemon=True).start()
    time.sleep(5)
    for path in paths:
        for longest in TOKENS:
            texts = prompts(Tokenizer.from_file(path), longest, random.Random(0))
            n, seconds = tokenising(path, texts)
            http_s = min(asyncio.run(first_event(texts[i % PROMPTS])) for i in range(REQUESTS))
            print(
                f"{path}: {n:.0f} tokens: tokenising {1e3 * seconds:.2f} ms, {1e6 * seconds / n:.2f} us each; "
                f"HTTP {1e3 * http_s:.2f} ms"
            )


if __name__ == "__main__":
    main(sys.argv[1:])
