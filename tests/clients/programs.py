"""Programs that people use, coding agents most of all, each asked one question without a terminal.

A program has a home of its own with the files that docs/clients.md shows, so nothing of its user's is read or written.
`docs/clients.md` says in the same words how each is configured; `test_programs.py` compares.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.clients.install import node_folder, versions

QUESTION = "Say hello."
ARCH = {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())  # as node has it
LIMIT = 240.0  # seconds of one program
BEGIN, END = "<!-- programs: make clients -->\n", "<!-- end of programs -->\n"


@dataclass(frozen=True)
class Program:
    """`words`: its command line. `environment` and `files` (by their path in its home) configure it; <URL>, <MODEL> and
    <KEY> stand for the gateway's. `route`: the one that it uses."""

    name: str
    package: str
    words: tuple[str, ...]
    route: str
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    binary: str = ""  # in `node_modules`, where the package's launcher would need its install script

    def run(self, home: Path, values: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        """Ask it QUESTION in an empty folder."""

        def filled(text: str) -> str:
            for name, value in values.items():
                text = text.replace(name, value)
            return text

        for path, text in self.files.items():
            (home / path).parent.mkdir(parents=True, exist_ok=True)
            (home / path).write_text(filled(text))
        work = home / "work"
        work.mkdir()
        modules = node_folder() / "node_modules"
        program = modules / (self.binary.format(arch=ARCH) if self.binary else f".bin/{self.words[0]}")
        kept = {"PATH": os.environ["PATH"], "HOME": str(home), "NO_PROXY": "*", "CI": "1"}
        environment = kept | {name: filled(value) for name, value in self.environment.items()}
        return subprocess.run(
            [str(program), *map(filled, self.words[1:])],
            env=environment, cwd=work, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=LIMIT, check=False,
        )  # fmt: skip


PROGRAMS = (
    Program(
        "Claude Code",
        "@anthropic-ai/claude-code",
        ("claude", "-p", QUESTION, "--model", "<MODEL>"),
        "/v1/messages",
        {
            "ANTHROPIC_BASE_URL": "<URL>",
            "ANTHROPIC_AUTH_TOKEN": "<KEY>",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "<MODEL>",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "2000",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
        binary="@anthropic-ai/claude-code-linux-{arch}/claude",
    ),
    Program(
        "Codex",
        "@openai/codex",
        ("codex", "exec", "--skip-git-repo-check", QUESTION),
        "/v1/responses",
        {"WEIR_KEY": "<KEY>"},
        {
            ".codex/config.toml": """\
model = "<MODEL>"
model_provider = "weir"

[model_providers.weir]
name = "weir"
base_url = "<URL>/v1"
env_key = "WEIR_KEY"
wire_api = "responses"
"""
        },
    ),
    Program(
        "opencode",
        "opencode-ai",
        ("opencode", "run", "--model", "weir/<MODEL>", QUESTION),
        "/v1/chat/completions",
        {"WEIR_KEY": "<KEY>"},
        {
            ".config/opencode/opencode.json": """\
{
  "provider": {
    "weir": {
      "npm": "@ai-sdk/openai-compatible",
      "options": {"baseURL": "<URL>/v1", "apiKey": "{env:WEIR_KEY}"},
      "models": {"<MODEL>": {"limit": {"context": 32768, "output": 2000}}}
    }
  }
}
"""
        },
        binary="opencode-linux-{arch}/bin/opencode",
    ),
    Program(
        "qwen-code",
        "@qwen-code/qwen-code",
        ("qwen", "-p", QUESTION),
        "/v1/chat/completions",
        {"OPENAI_BASE_URL": "<URL>/v1", "OPENAI_API_KEY": "<KEY>", "OPENAI_MODEL": "<MODEL>"},
    ),
    Program(
        "pi",
        "@mariozechner/pi-coding-agent",
        ("pi", "-p", "--provider", "weir", "--model", "<MODEL>", QUESTION),
        "/v1/chat/completions",
        {"WEIR_KEY": "<KEY>"},
        {
            ".pi/agent/models.json": """\
{
  "providers": {
    "weir": {"baseUrl": "<URL>/v1", "api": "openai-completions", "apiKey": "WEIR_KEY", "models": [{"id": "<MODEL>"}]}
  }
}
"""
        },
    ),
)


def told(program: Program) -> str:
    """The name of a program with the version that is tried."""
    return f"{program.name} {versions()['node', program.package]}"


def files() -> str:
    """The files that configure programs, as docs/clients.md shows them."""
    return "\n" + "".join(
        f"`~/{path}` of {program.name}:\n\n```{Path(path).suffix[1:]}\n{text}```\n\n"
        for program in PROGRAMS
        for path, text in program.files.items()
    )
