"""The steps of docker/Dockerfile.cpu without docker, in clean roots.

A root holds only the files that the Dockerfile copies and the parts of a base image. This machine's programs and Python
stand for the base image, read-only. The image is installed, run as its user and asked. The tests cannot see the base
image itself, nor layers.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.meta.source import ROOT

FILE = ROOT / "docker" / "Dockerfile.cpu"
CLEAN_ROOT = ROOT / "tests" / "meta" / "clean_root.sh"
PYTHON = Path(sys.base_prefix)
SHARED = f"{PYTHON} /opt"
"""Python, and the folder of packages that may stand in for an index."""

OF_ETC = (
    "alternatives hosts ld.so.cache ld.so.conf ld.so.conf.d login.defs nsswitch.conf pip.conf resolv.conf ssl".split()
)

CLIENT = """
import json, os, subprocess, sys, time, urllib.request
server = subprocess.Popen(json.loads(sys.argv[1]))
healthy = json.loads(sys.argv[2])
end = time.monotonic() + 240
while subprocess.run(healthy, stderr=subprocess.DEVNULL).returncode:
    assert server.poll() is None and time.monotonic() < end, server.poll()
    time.sleep(2)  # each try is a process, and takes from the boot
while True:
    try:
        urllib.request.urlopen("http://127.0.0.1:8000/ready")
        break
    except urllib.error.HTTPError:
        assert time.monotonic() < end
        time.sleep(0.2)
body = json.dumps({"prompt": "def add(a, b):", "max_tokens": 4, "temperature": 0}).encode()
asked = urllib.request.Request("http://127.0.0.1:8000/v1/completions", body)
text = json.load(urllib.request.urlopen(asked))["choices"][0]["text"]
server.terminate()
print(json.dumps({"text": text, "user": os.getuid(), "root": sorted(os.listdir("/")), "code": server.wait(60)}))
"""


def stages() -> list[list[tuple[str, str]]]:
    """Return instruction and arguments of each line of each stage."""
    text = re.sub(r"\\\n\s*", " ", FILE.read_text())
    lines = re.findall(r"^([A-Z]+) (.*)$", text, re.MULTILINE)
    found: list[list[tuple[str, str]]] = []
    for word, rest in lines:
        if word == "FROM":
            found.append([])
        elif found:
            found[-1].append((word, rest))
    return found


def new_root(folder: Path) -> Path:
    (folder / "etc").mkdir(parents=True)
    for name in OF_ETC:
        source = Path("/etc", name)
        if source.exists():
            if source.is_dir():
                shutil.copytree(source, folder / "etc" / name, symlinks=True)
            else:
                shutil.copy(source, folder / "etc" / name)
    for name in ("passwd", "group"):  # users and groups of the system
        lines = [line for line in Path("/etc", name).read_text().splitlines() if int(line.split(":")[2]) < 1000]
        (folder / "etc" / name).write_text("\n".join(lines) + "\n")
    return folder


def within(root: Path, *command: str, network: bool, **environment: str) -> str:
    """Return the output of ``command`` in ``root``.

    Without ``network`` it reaches only the machine itself.
    """
    path = f"{PYTHON}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_") and network}
    spaces = ["unshare", "--mount", *([] if network else ["--net"])]
    done = subprocess.run(
        [*spaces, CLEAN_ROOT, root, SHARED, *command], env={"PATH": path, "HOME": "/tmp", **pip, **environment},
        check=False, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def may_mount() -> bool:
    tried = ["unshare", "--mount", "--net", "sh", "-c", "mount --bind /usr /usr && chroot / true"]
    return os.name == "posix" and os.getuid() == 0 and not subprocess.run(tried, check=False).returncode


def has_index(folder: Path) -> bool:
    """Return whether pip finds packages."""
    tried = [PYTHON / "bin" / "python3", "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, "packaging"]
    return not subprocess.run(tried, check=False, capture_output=True, timeout=60).returncode


@pytest.mark.timeout(900)  # a minute of work, and a download
@pytest.mark.skipif(
    not (all(map(shutil.which, ("unshare", "setpriv", "ip", "mount"))) and may_mount()),
    reason="needs root and namespaces of its own",
)
def test_the_image_is_installed_in_a_clean_root_and_answers(tmp_path: Path) -> None:
    if not has_index(tmp_path / "tried"):
        pytest.skip("needs a package index")
    try:
        build_and_ask(new_root(tmp_path / "install"), new_root(tmp_path / "final"))
    finally:
        shutil.rmtree(tmp_path)  # gigabytes


def build_and_ask(first: Path, second: Path) -> None:
    install, final = stages()
    environment, app = dict[str, str](), "/"
    for word, rest in install:
        if word == "WORKDIR":
            app = rest
            (first / app.strip("/")).mkdir()
        elif word == "COPY":
            *sources, target = rest.split()
            for source in sources:
                place = first / app.strip("/") / (source if target == "./" else target)
                place.parent.mkdir(parents=True, exist_ok=True)
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, place, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(ROOT / source, place)
        else:
            assert word == "RUN"
            within(first, "sh", "-c", f"cd {app} && {rest}", network=True, PIP_COMPILE="0")
    user, entry, command, healthy = "", list[str](), list[str](), list[str]()
    for word, rest in final:
        if word == "RUN":
            within(second, "sh", "-c", rest, network=False)
        elif word == "COPY":
            assert rest == "--from=install /app /app"
            (first / "app").rename(second / "app")
        elif word == "ENV":
            environment |= dict(pair.split("=", 1) for pair in rest.split())
        elif word == "USER":
            user = rest
        elif word in ("ENTRYPOINT", "CMD"):
            entry, command = (json.loads(rest), command) if word == "ENTRYPOINT" else (entry, json.loads(rest))
        elif word == "HEALTHCHECK":
            healthy = json.loads(rest[rest.index("[") :])
        else:
            assert word in ("LABEL", "VOLUME", "EXPOSE")
    path = environment.pop("PATH").replace("$PATH", f"{PYTHON}/bin:/usr/sbin:/usr/bin:/sbin:/bin")
    serve = [*entry, *command, "--max-num-seqs=2", "--max-model-len=64", "--num-threads=1"]
    as_user = f"setpriv --reuid={user} --regid={user} --clear-groups"
    run = ["sh", "-c", f'ip link set lo up && exec {as_user} python -c "$0" "$@"', CLIENT]
    run += map(json.dumps, (serve, healthy))
    said = json.loads(within(second, *run, network=False, **environment, PATH=path).splitlines()[-1])
    assert said["text"] and said["user"] == int(user) > 0 and said["code"] == 0
    here = "app bin cache dev etc home lib lib64 opt proc sbin tmp usr"
    assert set(said["root"]) <= {*here.split(), PYTHON.parts[1]}
