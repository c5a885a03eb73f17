"""The command line: exit statuses, one-line errors, start-up time, what commands print."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from millpond.cli.main import app

HEAVY = ("torch", "httpx", "starlette", "zmq", "pydantic", "numpy", "rich.progress")


class FakeServer(BaseHTTPRequestHandler):
    """The edge: a server with the routes the client commands use."""

    requests: list[dict[str, Any]]

    def do_GET(self) -> None:
        self.answer({"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        if self.path == "/tokenize":
            self.answer({"tokens": [ord(char) for char in body["prompt"]]})
            return
        if body.get("max_tokens") == 13:
            self.answer({"error": {"message": "thirteen is unlucky"}}, status=400)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        is_chat = "messages" in body
        if is_chat and body["messages"][-1]["content"] == "think":
            self.event(
                {"choices": [{"index": 0, "finish_reason": None, "delta": {"reasoning_content": "Hm"}}]}
            )
        for text in ("Bon", "jour"):
            content = {"delta": {"content": text}} if is_chat else {"text": text}
            self.event({"choices": [{"index": 0, "finish_reason": None, **content}]})
        end = {"delta": {}} if is_chat else {"text": ""}
        self.event({"choices": [{"index": 0, "finish_reason": "stop", **end}]})
        self.event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, content: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(content)}\n\n".encode())

    def answer(self, content: dict[str, Any], status: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    with closing(ThreadingHTTPServer(("127.0.0.1", 0), FakeServer)) as server:
        server.close = server.server_close
        server.bodies = []
        server.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def invoke(*args: str, text: str | None = None):
    return CliRunner().invoke(app, list(args), input=text)


def test_importing_the_command_line_loads_nothing_heavy():
    code = f"import sys, millpond.cli.main; print(*[name for name in {HEAVY} if name in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.split() == []


def test_config_show_prints_toml_that_loads(tmp_path: Path):
    result = invoke("config", "show", "--set", "gateway.port=9000")
    assert result.exit_code == 0
    assert tomllib.loads(result.stdout)["gateway"]["port"] == 9000


def test_a_config_error_is_one_line_and_exit_status_2(tmp_path: Path):
    path = tmp_path / "bad.toml"
    path.write_text("[gateway]\nprot = 1\n")
    for command in (["config", "show"], ["serve"]):
        result = invoke(*command, "--config", str(path))
        assert result.exit_code == 2
        assert result.stderr.startswith("error: gateway.prot: no such setting; did you mean 'port'?")
        assert len(result.stderr.strip().splitlines()) == 1
        assert "Traceback" not in result.output


def test_nobody_at_the_address_is_one_line_and_exit_status_1():
    result = invoke("chat", "--url", "http://127.0.0.1:9", "--once", "hi")
    assert result.exit_code == 1
    assert "is the service running?" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_chat_once_prints_the_answer(server: ThreadingHTTPServer):
    result = invoke("chat", "--url", server.url, "--once", "Salut", "--system", "Be brief", "--seed", "4")
    assert (result.exit_code, result.stdout) == (0, "Bonjour\n")
    assert server.bodies[0] == {
        "model": "tiny",
        "seed": 4,
        "stream": True,
        "messages": [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Salut"}],
    }


def test_a_conversation_carries_its_history_until_new(server: ThreadingHTTPServer):
    result = invoke("chat", "--url", server.url, text="one\ntwo\n/new\nthree\n")
    assert result.exit_code == 0
    sent = [[message["content"] for message in body["messages"]] for body in server.bodies]
    assert sent == [["one"], ["one", "Bonjour", "two"], ["three"]]


def test_reasoning_is_shown_and_not_sent_back(server: ThreadingHTTPServer):
    result = invoke("chat", "--url", server.url, text="think\nagain\n")
    assert "Hm\nBonjour" in result.output
    assert {"role": "assistant", "content": "Bonjour"} in server.bodies[-1]["messages"]


def test_a_refused_chat_tells_the_servers_reason(server: ThreadingHTTPServer):
    result = invoke("chat", "--url", server.url, "--once", "hi", "--max-tokens", "13")
    assert (result.exit_code, result.stderr.strip()) == (1, "error: thirteen is unlucky")


def test_bench_serve_prints_a_table_and_writes_json(server: ThreadingHTTPServer, tmp_path: Path):
    out = tmp_path / "out.json"
    result = invoke("bench", "serve", "--url", server.url, "-n", "5", "--concurrency", "2", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert "5 completed, 0 failed" in result.stdout
    content = json.loads(out.read_text())
    assert content["report"]["num_output_tokens"] == 10
    assert len(content["requests"]) == 5


def test_bench_serve_replays_a_trace_at_its_own_times(server: ThreadingHTTPServer, tmp_path: Path):
    data = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 60 * i, "input_length": 40, "output_length": 8, "hash_ids": [i]} for i in range(3)]
    data.write_text("\n".join(json.dumps(line) for line in lines))
    out = tmp_path / "out.json"
    result = invoke(
        "bench", "serve", "--url", server.url, "--data", str(data), "--length-scale", "0.5", "--out", str(out)
    )
    assert result.exit_code == 0, result.output
    sent_ns = [record["sent_ns"] for record in json.loads(out.read_text())["requests"]]
    assert all(at_ns >= 60e6 * index for index, at_ns in enumerate(sent_ns))
    prompts = [body["prompt"] for body in server.bodies if "max_tokens" in body]
    assert [len(prompt) for prompt in prompts] == [20, 20, 20]


def test_a_bench_without_a_single_answer_fails(server: ThreadingHTTPServer):
    result = invoke("bench", "serve", "--url", server.url, "-n", "2", "--max-tokens", "13")
    assert result.exit_code == 1
    assert "2 x HTTP 400: thirteen is unlucky" in result.stdout


def test_a_simulation_runs_and_its_journal_replays(tmp_path: Path):
    args = ["-n", "20", "--rate", "5", "--output", "8", "--journal", str(tmp_path / "j")]
    result = invoke("sim", "run", *args, "--set", "group.d0.ranks=2")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["reasons"] == {"length": 20}
    replayed = invoke("sim", "replay", str(tmp_path / "j"))
    assert replayed.exit_code == 0, replayed.output
    assert replayed.stdout.count("equal plans") == 3
    assert invoke("sim", "replay", str(tmp_path)).exit_code == 2


def test_a_simulation_reads_a_trace_and_its_own_costs(tmp_path: Path):
    trace = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 100, "output_length": 5, "hash_ids": [1]}
    trace.write_text(json.dumps(line) + "\n")

    def ttft_s(*args: str) -> float:
        return json.loads(invoke("sim", "run", "--trace", str(trace), *args).stdout)["ttft_s"]["mean"]

    slow = ttft_s("--set", "sim_cost.prefill_token_ns=10000000")
    assert slow > 1.0 > ttft_s()


def test_collect_env_names_versions_and_no_places():
    result = invoke("collect-env")
    assert result.exit_code == 0
    assert "torch: " in result.stdout
    assert str(Path.home()) not in result.stdout


def test_version():
    assert invoke("version").stdout.strip().count(".") == 2
