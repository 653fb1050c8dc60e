"""Peer process: llama.cpp's server, asked over HTTP on this machine. Run by `process.py`."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

sys.path.append(str(Path(__file__).parent))
import peer_protocol as protocol  # type: ignore[import-not-found]

HOST = "127.0.0.1"
MAX_MODEL_LEN = 2048  # of each request
LOOKUP = 3  # tokens that a draft's beginning must repeat
START_SECONDS = 120


def start(options: dict[str, Any]) -> tuple[dict[str, Any], protocol.Generate]:
    model, num_seqs, k = options["model"], options["max_num_seqs"], options["k"]
    if not model.endswith(".gguf"):
        raise protocol.Refusal(f"llama.cpp reads .gguf files alone, and the model is {model}")
    folder = os.environ.get("LLAMA_CPP")
    binary = shutil.which("llama-server", path=folder)
    if binary is None:
        where = f"in {folder}" if folder else "on PATH"
        raise protocol.Refusal(f"there is no llama-server {where}; build llama.cpp")
    flags = ["--ctx-size", str(MAX_MODEL_LEN * num_seqs), "--parallel", str(num_seqs)]
    flags += ["--threads", str(options["threads"]), "--no-kv-unified", "--no-webui"]
    if k:
        flags += ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", str(LOOKUP)]
        flags += ["--spec-ngram-simple-size-m", str(k), "--spec-draft-n-max", str(k)]
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [binary, "--model", model, "--host", HOST, "--port", str(port), *flags],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    signal.signal(signal.SIGTERM, lambda *_: _stop(server))
    version = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True)
    _wait(server, port)

    def generate(prompts: protocol.Prompts, num_tokens: int) -> Iterator[protocol.Delivery]:
        return _generate(port, prompts, num_tokens)

    lines = (version.stdout + version.stderr).splitlines()
    found = [line.split(":", 1)[1].strip() for line in lines if line.startswith("version:")]
    description = {
        "version": found[0] if found else "?",
        "what": f"llama-server {' '.join(flags)}",
        "pid": server.pid,
        "threads": options["threads"],
    }
    return description, generate


def _stop(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    server.wait()
    sys.exit(0)


def _wait(server: subprocess.Popen[bytes], port: int) -> None:
    """Until the server has loaded the model."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if server.poll() is not None:
            raise protocol.Refusal(f"llama-server ended with exit code {server.returncode}")
        connection = http.client.HTTPConnection(HOST, port)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == http.HTTPStatus.OK:
                return
        except ConnectionError:
            pass
        finally:
            connection.close()
        time.sleep(0.05)
    server.terminate()
    raise protocol.Refusal(f"llama-server was not ready after {START_SECONDS} s")


def _generate(port: int, prompts: protocol.Prompts, num_tokens: int) -> Iterator[protocol.Delivery]:
    found: SimpleQueue[protocol.Delivery | None] = SimpleQueue()
    begin = time.perf_counter()

    def ask(index: int, prompt: list[int]) -> None:
        body = {
            "prompt": prompt,
            "n_predict": num_tokens,
            "temperature": 0.0,
            "top_k": 1,
            "ignore_eos": True,
            "cache_prompt": False,
            "stream": True,
            "return_tokens": True,
        }
        connection = http.client.HTTPConnection(HOST, port)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/completion", json.dumps(body), headers)
            for line in connection.getresponse():
                if line.startswith(b"data:"):
                    tokens = json.loads(line[5:]).get("tokens", [])
                    if tokens:
                        found.put((time.perf_counter() - begin, index, tokens))
        finally:
            connection.close()
            found.put(None)

    threads = [
        threading.Thread(target=ask, args=(index, list(prompt)))
        for index, prompt in enumerate(prompts)
    ]
    for thread in threads:
        thread.start()
    num_running = len(threads)
    while num_running:
        delivery = found.get()
        if delivery is None:
            num_running -= 1
        else:
            yield delivery


if __name__ == "__main__":
    protocol.serve(start)
