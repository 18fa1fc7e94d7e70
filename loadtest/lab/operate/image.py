"""Images as a user has them: built of deploy/container/Dockerfile, and the gateway's run.
`python -m loadtest.lab.operate.image --help`.

Exit status 0: both were built, and the gateway's ran as it should; 1: not so; 2: bad arguments, or no Podman.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from loadtest.lab.rows import parser_of, terminal
from loadtest.lab.vllm.real_vllm import cache
from loadtest.processes import until

ROOT = Path(__file__).parents[3]
DOCKERFILE = ROOT / "deploy/container/Dockerfile"
SUITE, MIRROR = "trixie", "http://deb.debian.org/debian"  # whose Python is the Dockerfile's
PACKAGES = "python3,python3-venv,python3-pip,ca-certificates"
CERTIFICATES = Path("/etc/ssl/certs")
BASE, GATEWAY, SIDECAR = (f"localhost/{name}" for name in ("weir-base", "weir-gateway", "weir-sidecar"))
CONTAINER = "weir-gateway-tried"
# A health check is asked for here; podman would have systemd ask.
BARE = ("--read-only", "--tmpfs=/tmp", "--network=none", "--no-healthcheck")
MODEL = "llama-3-8b"  # of --engine demo
HEALTHY, ANSWERED, STOPPED = 60.0, 60, 60  # seconds at most
ASK = f"""
import json, urllib.request as u
body = json.dumps({{"model": "{MODEL}", "max_tokens": 4, "messages": [{{"role": "user", "content": "Hello"}}]}})
to = u.Request("http://127.0.0.1:8000/v1/chat/completions", body.encode(), {{"content-type": "application/json"}})
print(u.urlopen(to, timeout={ANSWERED}).status)
"""
HELP = f"""\
Builds the images of deploy/container/Dockerfile with Podman, starts the gateway's with `serve --engine demo` on a
read-only root and without a network, and makes a call in it. Needs Podman and a runtime (apt-get install podman runc).

Where no registry of images is reached, the official Python image is replaced by Debian {SUITE} (apt-get install
mmdebstrap), and so is vLLM's: then the sidecar's image has no vLLM, and is built and asked for its version alone.
Images are kept outside the tree.
"""


class Missing(Exception):
    """A program is not installed; the message says what installs it."""


class Images:
    """Podman with a store of its own. `folder`: where that is, and the base image."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        # Without systemd there is no journal, and nobody who delegates control groups.
        self._podman = [_program("podman", "podman runc"), "--root", folder / "store", "--runroot", folder / "run",
                        "--cgroup-manager=cgroupfs", "--events-backend=file"]  # fmt: skip
        if shutil.which("runc"):  # an older crun refuses some layouts of control groups
            self._podman += ["--runtime", "runc"]

    def run(self, *words: object, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command of podman's. Raises CalledProcessError, with its output."""
        argv = [*map(str, self._podman), *map(str, words)]
        return subprocess.run(argv, check=check, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def base(self) -> str:
        """An image of Debian's Python, made once. Raises Missing."""
        if self.run("image", "exists", BASE, check=False).returncode != 0:
            packed = self._folder / f"{SUITE}.tar"
            make = [_program("mmdebstrap", "mmdebstrap"), "--variant=minbase", f"--include={PACKAGES}"]
            subprocess.run([*make, SUITE, packed, MIRROR], check=True, capture_output=True, text=True)
            self.run("import", packed, BASE)
            packed.unlink()
        return BASE

    def build(self, target: str, name: str, *arguments: str) -> str:
        """Build one target of the Dockerfile; how long that took, and the image's size."""
        began = time.monotonic()
        of_network = [f"--volume={CERTIFICATES}:{CERTIFICATES}:ro"] if CERTIFICATES.is_dir() else []
        given = [f"--build-arg={argument}" for argument in arguments]
        named = ("--file", DOCKERFILE, "--target", target, "--tag", name)
        self.run("build", "--isolation=chroot", "--format=docker", *named, *given, *of_network, ROOT)
        size = json.loads(self.run("image", "inspect", name).stdout)[0]["Size"]
        return f"{time.monotonic() - began:.0f} s, {size / 1e6:.0f} MB"


def _program(name: str, package: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise Missing(f"{name} is not installed: apt-get install {package}")
    return found


def limits() -> list[str]:
    """Flags by which a container has no higher limits than this process may give."""
    pairs = (("nofile", resource.RLIMIT_NOFILE, 65_536), ("nproc", resource.RLIMIT_NPROC, 4_096))
    bounds = {name: min(most, *(each for each in resource.getrlimit(kind) if each > 0)) for name, kind, most in pairs}
    return [f"--ulimit={name}={bound}:{bound}" for name, bound in bounds.items()]


def tried(images: Images) -> list[tuple[str, str, bool]]:
    """Try a container of the gateway's image. Return each question, its answer, and whether the answer is right."""
    check = json.loads(images.run("image", "inspect", GATEWAY).stdout)[0]["Healthcheck"]["Test"][1:]
    images.run("rm", "--force", "--ignore", CONTAINER)

    def inside(*words: str) -> subprocess.CompletedProcess[str]:
        return images.run("exec", CONTAINER, *words, check=False)

    try:
        serve = ("serve", "--engine", "demo", "--listen", "0.0.0.0:8000")
        images.run("run", "--detach", "--name", CONTAINER, *BARE, *limits(), GATEWAY, *serve)
        healthy = until(lambda: inside(*check).returncode == 0, HEALTHY, every=0.5)
        user = inside("id", "-u").stdout.strip()
        root, own = (inside("touch", path).stdout.strip() for path in ("/file", "/tmp/file"))  # noqa: S108 # in there
        began = time.monotonic()
        answer = inside("python", "-c", ASK)
        first = time.monotonic() - began
        began = time.monotonic()
        images.run("stop", f"--time={STOPPED}", CONTAINER)
        stopped = time.monotonic() - began
        status = images.run("inspect", "--format={{.State.ExitCode}}", CONTAINER).stdout.strip()
        said = images.run("logs", CONTAINER).stdout
    finally:
        images.run("rm", "--force", "--ignore", CONTAINER)
    told = f"{answer.stdout.strip()[-200:]}, {first:.1f} s"
    return [
        ("its health check passes", "never" if healthy is None else f"after {healthy:.1f} s", healthy is not None),
        ("its user", user, user == "10001"),
        ("a file in /", root or "written", "Read-only file system" in root),
        ("a file in /tmp", own or "written", not own),
        ("a first call, its model not awake", told, answer.stdout == "200\n"),
        ("exit status after `podman stop`", f"{status}, {stopped:.1f} s", status == "0" and stopped < STOPPED),
        ("tracebacks in its output", str(said.count("Traceback")), "Traceback" not in said),
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Build, run and print; the exit status."""
    parser = parser_of("operate.image", HELP)
    parser.add_argument("--base", metavar="IMAGE", help="with a Python, in place of Debian's, such as python:3.13-slim")
    parser.add_argument("--engine-base", metavar="IMAGE", help="with vLLM, such as vllm/vllm-openai:v0.32.0")
    options = parser.parse_args(argv)
    console = terminal()
    table = Table("image", "what", "seen")
    try:
        images = Images(cache() / "images")
        base = options.base or images.base()
        engine_base = options.engine_base or images.base()
        table.add_row("gateway", f"built on {base}", images.build("gateway", GATEWAY, f"BASE={base}"))
        seen = tried(images)
        built = images.build("sidecar", SIDECAR, f"BASE={base}", f"ENGINE_BASE={engine_base}")
        version = images.run("run", "--rm", *BARE, *limits(), SIDECAR, "--version").stdout
    except Missing as error:
        console.print(str(error))
        return 2
    except subprocess.CalledProcessError as error:
        console.print((error.stdout or error.stderr or str(error))[-4000:], markup=False)
        return 1
    for what, answer, right in seen:
        table.add_row("gateway", what, answer if right else f"[red]{answer}[/]")
    table.add_row("sidecar", f"built on {engine_base}", built)
    table.add_row("sidecar", "sidecar --version", version.strip())
    console.print(table)
    return int(not all(right for *_, right in seen))


if __name__ == "__main__":
    sys.exit(main())
