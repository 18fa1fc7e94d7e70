"""Clients and features of docs/clients.md: which cells a client's program runs, and why the others are not run."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.clients.install import node_folder, node_program, python_program, versions

DRIVERS = Path(__file__).parent / "drivers"
PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
BEGIN, END = "<!-- table: make clients -->\n", "<!-- end of table -->\n"
LIMIT = 240.0  # seconds of one client's whole program

FEATURES = {
    "chat": "chat",
    "stream": "stream",
    "tools": "tools",
    "structured": "structured output",
    "embeddings": "embeddings",
    "responses": "responses",
    "messages": "messages",
    "count_tokens": "count_tokens",
    "batches": "files, batches",
    "errors": "errors, Retry-After",
    "cancel": "cancel",
}
# Nobody asks anywhere else: no proxy, and no list of prices that LiteLLM would fetch.
QUIET = {"NO_PROXY": "*", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
NO_SUCH = "-"  # the client has no such call


@dataclass(frozen=True)
class Client:
    """One row. `program`: its driver. `package`: whose version is shown. `lacks`: the features that its package has
    no call for. `not_run`: features that it has and that no test runs, each with the reason."""

    name: str
    program: str
    package: str
    lacks: tuple[str, ...] = ()
    not_run: Mapping[str, str] = field(default_factory=dict)

    @property
    def cells(self) -> list[str]:
        """The features that its program runs."""
        return [feature for feature in FEATURES if feature not in self.lacks and feature not in self.not_run]

    def argv(self) -> list[str]:
        path = DRIVERS / self.program
        return [str(python_program() if path.suffix == ".py" else node_program()), str(path)]

    def run(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Run its program: each cell with how it failed, empty where it did not."""
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
        given = kept | environment | QUIET | {"WEIR_PACKAGES": str(node_folder())}
        ended = subprocess.run(self.argv(), env=given, capture_output=True, text=True, timeout=LIMIT, check=False)
        lines = [line for line in ended.stdout.splitlines() if line.startswith('{"cell"')]
        told = {line["cell"]: line["failure"] for line in map(json.loads, lines)}
        if ended.returncode:
            told = {cell: told.get(cell, ended.stderr[-4000:] or "it ended early") for cell in self.cells}
        return told


ANTHROPIC_LACKS = ("chat", "embeddings", "responses")
OPENAI_LACKS = ("messages", "count_tokens")
ITS_OWN_BATCHES = {"batches": "Anthropic's are another API, which is 404 here"}
CLIENTS = (
    Client("openai (Python)", "openai_python.py", "openai", OPENAI_LACKS),
    Client("anthropic (Python)", "anthropic_python.py", "anthropic", ANTHROPIC_LACKS, ITS_OWN_BATCHES),
    Client("openai (node)", "openai_node.mjs", "openai", OPENAI_LACKS),
    Client("@anthropic-ai/sdk (node)", "anthropic_node.mjs", "@anthropic-ai/sdk", ANTHROPIC_LACKS, ITS_OWN_BATCHES),
    Client(
        "LiteLLM",
        "litellm_python.py",
        "litellm",
        not_run={"count_tokens": "counted by LiteLLM itself", "batches": "no test yet"},
    ),
    Client("langchain-openai", "langchain_python.py", "langchain-openai", (*OPENAI_LACKS, "batches")),
    Client(
        "LlamaIndex (openai-like)",
        "llama_index_python.py",
        "llama-index-llms-openai-like",
        ("responses", *OPENAI_LACKS, "batches"),
    ),
    Client(
        "Instructor",
        "instructor_python.py",
        "instructor",
        ("embeddings", "count_tokens"),
        {"chat": "the package's own calls all have a schema", "responses": "no test yet", "batches": "no test yet"},
    ),
    Client(
        "Pydantic AI",
        "pydantic_ai_python.py",
        "pydantic-ai-slim",
        ("batches",),
        {
            "messages": "its model for Anthropic fails beside this anthropic, before it sends",
            "count_tokens": "as messages",
        },
    ),
    Client("Vercel's ai", "ai_node.mjs", "ai", ("count_tokens", "batches")),
)


def table(ends: Mapping[tuple[str, str], str]) -> str:
    """The table as Markdown, from how each cell that was run ended."""
    installed = versions()
    head = ["client", *FEATURES.values()]
    rows = [head, ["---"] * len(head)]
    for client in CLIENTS:
        python = client.program.endswith(".py")
        row = [f"{client.name} {installed[('python' if python else 'node', client.package)]}"]
        for feature in FEATURES:
            if feature in client.lacks:
                row.append(NO_SUCH)
            elif feature in client.not_run:
                row.append(f"not run: {client.not_run[feature]}")
            else:
                row.append("**fails**" if ends[client.name, feature] else "yes")
        rows.append(row)
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def written(page: str, made: str) -> str:
    """The page with the table in its place."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{made}\n{END}{after}"
