"""Python processes that preheat starts import from the places that their parent imports from, and from no other."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest

from preheat import startup
from preheat.errors import PreheatError
from preheat.parallel import ranks
from preheat.server.replicas import process
from preheat.settings import Settings
from preheat.transport import InlineTransport
from preheat.utils.children import child_environment
from tests.cpu.forked_ranks import start_a_process
from tests.meta.source import MODULES, ROOT, name_of


def open_commands(source: str) -> Iterator[list[str]]:
    """Yield the words of commands of Python that also import from the folder of work, in place of `python_command`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.List) and node.elts and ast.unparse(node.elts[0]) == "sys.executable":
            words = [str(word.value) for word in node.elts if isinstance(word, ast.Constant)]
            if not {"-P", "-I"} & set(words):
                yield words


def test_no_child_imports_from_the_folder_of_work():
    assert {name_of(path): words for path in MODULES for words in open_commands(path.read_text())} == {}
    assert list(open_commands('[sys.executable, "-m", "preheat"]')) == [["-m", "preheat"]]  # control


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Go to a folder with a module that ends its importer, and have another folder with a module ``entry_of_child``."""
    for name, module, text in (
        ("work", "msgspec.py", "import os; os._exit(77)"),
        ("own", "entry_of_child.py", "import os\n\ndef run(settings, address):\n    os._exit(settings.port % 100)\n"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / module).write_text(text)
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.syspath_prepend(str(tmp_path / "own"))


def status(environment: dict[str, str]) -> int:
    """Return the exit status of an engine's process whose entry leaves with the last digits of the port."""
    with process._start(["ipc://nowhere", "entry_of_child:run"], environment) as child:
        assert child.stdin is not None
        child.stdin.write(msgspec.json.encode(Settings.load({"model": "bundled", "port": 8042}, {})) + b"\n")
        child.stdin.flush()
        return child.wait(60)  # the child ends with its standard input, too: leave that open


def test_an_engine_imports_from_the_places_of_its_server(places):
    assert status(child_environment()) == 42
    assert status(os.environ | {"PYTHONPATH": str(ROOT / "src")}) == 1  # control: the entry is not found


def test_a_rank_is_given_the_places_of_its_engine(monkeypatch, places):
    seen = []
    monkeypatch.setattr(ranks, "Child", lambda command, **more: seen.append((command, more["env"])))
    start_a_process(1, "cpu")  # other tests of this process may fork ranks
    ((command, environment),) = seen
    code = "import entry_of_child, msgspec"
    words = [sys.executable, *command[1 : command.index("-m")], "-c", code]
    assert subprocess.run(words, env=environment, check=False).returncode == 0
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 77  # control


WAITING = """
import sys
from preheat.boot.early import waiting_ranks
from preheat.settings import Settings
from preheat.transport import InlineTransport

children = waiting_ranks(Settings.load({"model": "bundled", "tensor_parallel_size": 2}, {}))
started, = children._waiting
assert "torch" not in sys.modules and started.process.poll() is None
children.leave()
assert started.process.returncode is not None and children.launch() == []
"""


def test_ranks_start_before_their_engine_imports_torch():
    found = subprocess.run([sys.executable, "-c", WAITING], env=child_environment(), capture_output=True, check=False)
    assert found.returncode == 0, found.stderr.decode()


def test_a_boot_that_fails_ends_the_ranks_that_wait_for_orders(monkeypatch):
    """The device is picked while ranks import torch; without it the boot fails."""
    begun = []
    monkeypatch.setattr(ranks, "_child", lambda *words: begun.append(start_a_process(*words)) or begun[-1])
    monkeypatch.setattr(startup, "pick_backend", lambda device: {}[device])
    settings = Settings.load({"model": "bundled", "tensor_parallel_size": 4}, {})
    with pytest.raises(PreheatError, match="KeyError: 'auto'"):
        startup.boot_engine(settings, InlineTransport())
    assert len(begun) == 3 and all(each.process.poll() is not None for each in begun)


PRELOADED = """
import sys
from preheat.backends import registry
from preheat.backends.cuda.device import early

early.has_driver = lambda: {driver}
registry.preload("{device}")
sys.exit(7 if "preheat.backends.cuda.backend" in sys.modules else 0)
"""


@pytest.mark.parametrize(
    ("device", "driver", "status"), [("cuda", False, 7), ("auto", True, 7), ("auto", False, 0), ("cpu", True, 0)]
)
def test_a_rank_imports_the_kernels_of_a_gpu_where_one_will_be_picked(device, driver, status):
    code = PRELOADED.format(device=device, driver=driver)
    assert subprocess.run([sys.executable, "-c", code], env=child_environment(), check=False).returncode == status
