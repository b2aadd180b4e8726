"""Compare the bits of 64-bit Arm with this machine's: boot the engine of both, Arm's under an emulator.

``python -m tools.emulated_arm FOLDER [options of preheat]`` fills FOLDER with a Python, the C library and the wheels of
64-bit Arm (about a gigabyte, once), needs QEMU's user mode, ``apt-get`` and ``dpkg-deb`` on the path, and takes some
minutes. It records a boot here, then runs ``preheat verify --digest`` on the record under the emulator: LLVM compiles
there, threads run there, and every item of the plan runs there. The exit status is 0 if the bits are equal.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
DEBIAN = """libc6 libgcc-s1 libstdc++6 libgomp1 zlib1g libffi8 libssl3 libexpat1 libbz2-1.0 liblzma5 libuuid1
libsqlite3-0 python3.11 python3.11-minimal libpython3.11-minimal libpython3.11-stdlib""".split()
TORCH = "torch==2.10.0"
"""The last wheel for Arm on PyPI without CUDA."""

UNPINNED = ("torch==", "llguidance==")
WHEELS = """llvmlite numpy msgspec pillow safetensors tokenizers huggingface_hub jinja2 markupsafe pyzmq starlette
uvicorn uvloop httptools prometheus-client pyyaml python-multipart tqdm llguidance filelock fsspec typing_extensions
sympy mpmath networkx packaging regex anyio idna h11 click""".split()
OPTIONS = """--device cpu --execution-mode llvm --dtype bfloat16 --num-threads 2 --max-num-seqs 2 --max-model-len 128
--max-num-batched-tokens 32 --block-size 16 --num-gpu-blocks-override 40 --cache-dir off""".split()
"""A small plan, so that an emulator runs it in minutes; options of the command line come behind."""


def main() -> None:
    folder, asked = Path(sys.argv[1]).resolve(), sys.argv[2:]
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if emulator is None:
        sys.exit("no qemu-aarch64 on the path (Debian: apt install qemu-user)")
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "root/usr/bin/python3.11").exists():
        _system(folder)
    if not (folder / "site/torch").exists():
        _packages(folder)
    python, record = _python(folder, emulator), folder / "record.json"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "preheat", "warm", "--json", *OPTIONS, *asked]
    record.write_bytes(subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment).stdout)
    sys.exit(subprocess.call([str(python), "-m", "preheat", "verify", "--digest", str(record), *OPTIONS, *asked]))


def _system(folder: Path) -> None:
    """Unpack Debian's packages for Arm, with lists of their own: the system's are not changed."""
    for part in ("state/lists/partial", "cache/archives/partial", "debs"):
        (folder / "apt" / part).mkdir(parents=True, exist_ok=True)
    state, cache = folder / "apt/state", folder / "apt/cache"
    options = ["APT::Architecture=arm64", "APT::Architectures=arm64", f"Dir::State={state}", f"Dir::Cache={cache}"]
    apt = [
        "apt-get",
        "-qq",
        *(word for option in [*options, "Dir::State::status=/dev/null"] for word in ("-o", option)),
    ]
    subprocess.run([*apt, "update"], check=True)
    subprocess.run([*apt, "download", *DEBIAN], check=True, cwd=folder / "apt/debs")
    for package in (folder / "apt/debs").glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", package, folder / "root"], check=True)


def _packages(folder: Path) -> None:
    """Install the wheels, in the versions that CI pins unless they have no wheel for Arm without CUDA."""
    pins = folder / "constraints.txt"
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins.write_text("".join(f"{line}\n" for line in lines if not line.startswith(UNPINNED)))
    platforms = [f"--platform=manylinux{kind}_aarch64" for kind in ("_2_28", "_2_17", "2014")]
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile", "--only-binary=:all:"]
    command += ["--python-version=3.11", *platforms, f"--target={folder / 'site'}", f"--constraint={pins}"]
    subprocess.run([*command, TORCH, *WHEELS], check=True)


def _python(folder: Path, emulator: str) -> Path:
    """Return a command that runs Arm's Python, and has processes that Python starts run it too."""
    (folder / "site/sitecustomize.py").write_text('import os, sys\nsys.executable = os.environ["EMULATED_PYTHON"]\n')
    script, path = folder / "python", f"{ROOT / 'src'}:{folder / 'site'}"
    script.write_text(
        f'#!/bin/sh\nexec env EMULATED_PYTHON="{script}" PYTHONPATH="{path}" "{emulator}" -L "{folder / "root"}" '
        f'"{folder / "root/usr/bin/python3.11"}" "$@"\n'
    )
    script.chmod(0o755)
    return script


if __name__ == "__main__":
    main()
