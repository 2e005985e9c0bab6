"""What README.md has a new user paste works as it stands there, but for the port."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys

from .real import ROOT, RealClient, RealServer

DEFAULT = "http://127.0.0.1:8080"
README = (ROOT / "README.md").read_text()


async def test_the_request_for_curl(smollm2: RealClient) -> None:
    (command,) = re.findall(r"^    (curl .*\\\n.*)$", README, re.MULTILINE)
    words = shlex.split(command)
    body, header = words[words.index("-d") + 1], words[words.index("-H") + 1]
    name, _, value = header.partition(": ")
    url = words[1].replace(DEFAULT, smollm2.base)
    async with smollm2.session.post(url, data=body, headers={name: value}) as answer:
        assert answer.status == 200
        choice = (await answer.json())["choices"][0]
    assert choice["message"]["content"] and json.loads(body)["max_tokens"] < 100


def test_the_program_for_the_openai_package(smollm2_server: RealServer) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert DEFAULT in program
    program = program.replace(DEFAULT, smollm2_server.base)
    program = program.replace("stream=True,", "stream=True, max_tokens=16, temperature=0,")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 3


def test_the_model_name_in_the_examples(smollm2_server: RealServer) -> None:
    (listed,) = json.loads(smollm2_server.get("/v1/models"))["data"]
    named = re.findall(r'model(?:=|: |  +)"?([\w.-]+-Instruct[\w.-]*)', README)
    assert len(named) >= 3 and set(named) == {listed["id"]}
