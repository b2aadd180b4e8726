"""The import rule: arrows point down, and no part knows a part above it."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.meta.source import MODULES, PACKAGE, ROOT, imports, name_of

# Every part may use these, and they may use only each other.
VALUES = {"configs", "options", "pooling"}
BASE = {"core", "settings", "limits", "cache_groups", "errors", "metrics", "utils", "backends.names"} | VALUES

# Every part, and the parts that it may import. "backends.base" is a platform in general: the protocol and the facts'
# type. "backends" are the platforms themselves, from which the boot picks one.
RULE = {
    "ops": "",
    "backends.cold": "",
    "backends.rendezvous": "",
    "backends.base": "ops backends.cold backends.rendezvous",
    "backends": "backends.base backends.cold backends.rendezvous ops",
    "plan": "backends.base",
    "model": "ops backends.base",
    "schedule": "plan",
    "transport": "",
    "kv_transfer": "schedule",
    "frontend": "",
    "grammar": "schedule ops",
    "execution": "plan schedule kv_transfer model ops backends.base",
    "lora": "schedule model ops backends.base",
    "engine": "plan schedule grammar kv_transfer lora execution backends.base",
    "warmup": "plan schedule grammar execution model ops backends backends.base backends.cold engine frontend"
    " transport",
    "verify": "plan schedule grammar kv_transfer lora execution model ops backends backends.base engine frontend"
    " warmup transport",
    "parallel": "plan schedule lora execution model ops backends backends.base backends.cold backends.rendezvous"
    " warmup",
    "elastic": "schedule model execution backends.base parallel engine warmup verify",
    "boot.values": "plan schedule grammar lora execution model backends.base parallel engine warmup verify",
    "boot.device": "boot.values plan model backends.base parallel",
    "boot.parts": "boot.values plan schedule grammar execution model backends.base parallel elastic",
    "boot.loop": "boot.values plan schedule execution model backends.base engine kv_transfer verify warmup elastic",
    "boot": "boot.values boot.device boot.parts boot.loop plan schedule grammar lora execution model ops backends"
    " backends.base parallel engine kv_transfer transport warmup verify elastic",
    "named_files": "frontend lora model",
    "extras": "",
    "extras.doctor": "backends model startup warmup",
    "startup": "boot named_files plan model backends backends.base engine frontend transport warmup verify",
    "server": "startup schedule engine frontend transport warmup backends",
    "library.inputs": "frontend",
    "library.engine_args": "",
    "library.offline": "library.inputs engine frontend transport warmup",
    "library.stepping": "library.offline library.inputs frontend",
    "library.worker": "engine model",
    "llm": "library.engine_args library.inputs library.offline library.stepping library.worker startup engine model"
    " frontend transport warmup",
    "async_llm": "library.engine_args library.inputs llm library.stepping frontend",
    "library.refused_names": "",
    "library.vllm_modules": "",
    "library": "",
    "extras.client": "",
    "reference": "model execution ops backends backends.base",
    "extras.calibration": "llm model schedule execution backends.base",
    "cli": "extras.calibration extras.client extras.doctor startup engine llm server plan warmup verify frontend"
    " transport backends backends.base",
    "__init__": "async_llm library.engine_args library.inputs llm library.refused_names frontend reference execution",
    "serve_ray": "backends cli server",
    "__main__": "cli",
}

# Parts that may not use all of the base.
LESS = {
    "ops": {"core", "errors"},
    "backends": BASE - {"metrics"},
    "backends.base": BASE - VALUES - {"metrics", "utils"},
}

PARTS = sorted(BASE | set(RULE), key=len, reverse=True)

# Nothing in the process that speaks HTTP may import torch, nor may planning and scheduling.
WITHOUT_TORCH = (
    "server.", "frontend.", "grammar.", "schedule.", "kv_transfer.", "plan.", "transport.",
    "backends.cpu.facts", "backends.cuda.facts", "backends.hpu.facts",
    "backends.hpu.detect", "backends.hpu.environment", "backends.cuda.device.early", "backends.cuda.device.triton_key",
    "backends.cuda.device.card", "backends.cuda.environment", "backends.cuda.lacking",
    "engine.progress", "engine.loop", "engine.admission", "lora.service",
    "warmup.record", "warmup.page", "warmup.charts", "warmup.report",
    "warmup.dummy_requests",
    "verify.names", "verify.identity", "verify.prompts", "verify.compare", "verify.against", "verify.command",
    *(f"{name}." for name in sorted(BASE)), "cli", "extras.client",
)  # fmt: skip


def part_of(module: str) -> str:
    """Return the longest part's name that ``module`` begins with."""
    return next((part for part in PARTS if f"{module}.".startswith(f"{part}.")), "") or "__init__"


def ours(source: str) -> set[str]:
    """Return the parts of preheat that ``source`` imports."""
    names = (name.removeprefix("preheat.") for name in imports(ast.parse(source)) if name.startswith("preheat."))
    return {part_of(name) for name in names} - {"__init__"}


def forbidden(module: str, source: str) -> set[str]:
    part = part_of(module)
    allowed = BASE if part in BASE else LESS.get(part, BASE) | set(RULE[part].split()) | {part}
    return ours(source) - allowed


def test_modules_import_only_allowed_modules():
    found = {name_of(path): forbidden(name_of(path), path.read_text()) for path in MODULES}
    assert {name: parts for name, parts in found.items() if parts} == {}


def test_the_rule_can_fail():
    assert forbidden("schedule.queue", "from preheat.execution.executor import Executor") == {"execution"}
    assert forbidden("core", "import preheat.llm") == {"llm"}
    assert forbidden("plan.cost", "from preheat.backends.base.facts import Facts") == set()
    assert forbidden("plan.cost", "from preheat.backends.cpu.backend import CpuBackend") == {"backends"}
    assert forbidden("backends.cuda.matmul.linear", "from preheat.execution.executor import Executor") == {"execution"}
    assert forbidden("ops.norm", "from preheat.settings import Settings") == {"settings"}


def test_the_rule_has_no_cycle():
    order = []
    remaining = {part: set(allowed.split()) for part, allowed in RULE.items()}
    while remaining:
        free = [part for part, allowed in remaining.items() if allowed <= set(order)]
        assert free, f"a cycle among {sorted(remaining)}"
        order += free
        remaining = {part: allowed for part, allowed in remaining.items() if part not in free}


def names_torch(path: Path) -> bool:
    return any(name.split(".")[0] == "torch" for name in imports(ast.parse(path.read_text())))


def test_torch_free_modules_never_name_torch():
    free = [path for path in MODULES if f"{name_of(path)}.".startswith(WITHOUT_TORCH)]
    assert [name_of(path) for path in free if names_torch(path)] == []
    assert names_torch(PACKAGE / "backends" / "cpu" / "attention.py")


def test_the_http_process_never_imports_torch():
    modules = ["preheat.server.app", "preheat.startup", "preheat.llm"]
    modules += [f"preheat.{name_of(path)}" for path in MODULES if f"{name_of(path)}.".startswith(WITHOUT_TORCH)]
    code = f"import sys, importlib as i; [i.import_module(m) for m in {modules}]; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr or "torch was imported"


LARGE = "torch", "numpy", "llvmlite", "transformers", "tokenizers", "starlette", "msgspec", "zmq"


def imported(statement: str) -> set[str]:
    """Return the large packages that a statement imports, in a process of its own."""
    code = f"{statement}; import sys; print(*[name for name in {LARGE} if name in sys.modules])"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_importing_the_library_imports_no_large_package():
    assert imported("import preheat") == set()
    assert imported("from preheat import LLM, SamplingParams") & {"torch", "llvmlite", "transformers"} == set()
    assert imported("import preheat.cli.main") & {"torch", "llvmlite", "transformers", "starlette"} == set()
    assert "numpy" in imported("import preheat.core")


def test_the_torch_check_can_fail():
    code = "import sys, preheat.backends.cpu.attention; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 1


RUN = "from preheat import LLM, SamplingParams as P; LLM().generate('import os', P(max_tokens=2), use_tqdm=False)"
LEAVE = "import sys; sys.exit('triton' in sys.modules)"


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: it exists for Linux alone")
def test_an_engine_on_a_cpu_never_imports_triton():
    assert subprocess.run([sys.executable, "-c", f"{RUN}; {LEAVE}"], check=False).returncode == 0
    assert subprocess.run([sys.executable, "-c", f"import triton; {LEAVE}"], check=False).returncode == 1


# Modules of kernels that only some models or commands use.
LATE = {"recurrence.delta", "recurrence.kernels", "attention.latent", "matmul.hopper.large_m_fp8",
        "matmul.hopper.small_m", "matmul.hopper.mxfp4_experts", "matmul.lora.routed", "matmul.moe.experts",
        "matmul.moe.route", "ranks.peer", "ranks.peer_kernels", "ranks.peer_norm", "matmul.tune"}  # fmt: skip
CUDA = """
import sys, torch, preheat.boot.engine, preheat.backends.cuda.backend
print(*[name for name in sys.modules if name.startswith("preheat.backends.cuda.")])
print(hasattr(torch.ops.preheat, "silu_and_mul"))
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: it exists for Linux alone")
def test_the_cuda_backend_loads_the_kernels_of_every_model_alone():
    done = subprocess.run([sys.executable, "-c", CUDA], capture_output=True, text=True, check=True)
    modules, operations = done.stdout.splitlines()
    loaded = {name.removeprefix("preheat.backends.cuda.") for name in modules.split()}
    assert loaded & LATE == set()
    assert loaded >= {"attention.paged", "pointwise.norm", "matmul.layer"}
    assert operations == "False"  # a compiler alone needs operations of torch


def test_late_modules_exist():
    assert {f"backends.cuda.{name}" for name in LATE} <= {name_of(path) for path in MODULES}


def test_a_compiler_finds_the_operations():
    code = (
        "import torch, preheat.ops.activation; from preheat.ops.opaque import register_operations as register; "
        "register(); register(); print(hasattr(torch.ops.preheat, 'silu_and_mul'))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "True\n"


@pytest.mark.parametrize("part", ["schedule", "execution", "model", "ops", "backends"])
def test_warm_up_is_not_a_mode_of_the_runner(part):
    found = {f"{path.name}: {name}" for path in (PACKAGE / part).rglob("*.py") for name in warm_names(path.read_text())}
    assert found - TRITON == set()
    assert [path for path in (PACKAGE / part).rglob("*") if "warm" in path.name.lower()] == []


# Triton's name for compiling without a launch.
TRITON = {"compiling.py: warmup"}


def warm_names(source: str) -> set[str]:
    """Return identifiers with "warm" in them."""
    fields = ("id", "attr", "name", "arg", "asname", "module")
    values = [getattr(node, field, None) for node in ast.walk(ast.parse(source)) for field in fields]
    return {value for value in values if isinstance(value, str) and "warm" in value.lower()}


def test_the_check_for_warm_names_can_fail():
    assert warm_names("def run(self, warmup_mode=False): self.is_warm = 1") == {"warmup_mode", "is_warm"}


# Calls that make a CUDA graph.
CAPTURES = re.compile(r"\bCUDAGraph\(|\bcuda\.graph\(")


def test_graphs_are_captured_in_one_place():
    """Graphs are captured in one place, on the stream that serves.

    One capture on another stream, as `torch.cuda.graph` does it, slows down all later graphs.
    """
    assert [name_of(path) for path in MODULES if CAPTURES.search(path.read_text())] == ["backends.cuda.device.graph"]
    assert CAPTURES.search("with torch.cuda.graph(g): ...")


def test_imported_packages_are_declared_and_nothing_else():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {_normal(dependency) for dependency in project["dependencies"]}
    used = {name.split(".")[0] for path in MODULES for name in imports(ast.parse(path.read_text()))}
    third_party = {_PROJECTS.get(name, name) for name in used - sys.stdlib_module_names - {"preheat"}}
    assert {_normal(name) for name in third_party} - declared == OPTIONAL
    assert declared <= {_normal(name) for name in third_party}


# Imported where they are needed, with an error that says so; Triton comes with torch's CUDA build.
OPTIONAL = {"transformers", "ray", "opentelemetry", "shtab", "triton", "xgrammar"}

_PROJECTS = {"PIL": "pillow", "yaml": "pyyaml", "zmq": "pyzmq", "prometheus_client": "prometheus-client"}


def _normal(requirement: str) -> str:
    return re.split(r"[<>=\[; ]", requirement.lower().replace("_", "-"))[0]


def imported_by(tree: ast.AST) -> set[str]:
    """Return the modules of preheat that ``tree`` imports, also for types alone and inside of functions."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name.removeprefix("preheat.") for name in found}


def in_circles(graph: dict[str, set[str]]) -> set[str]:
    """Return the nodes of ``graph`` that lie on a circle, or between two circles."""
    left = dict(graph)
    while True:
        named = set[str]().union(*left.values())
        ends = {name for name, names in left.items() if not names & set(left) or name not in named}
        if not ends:
            return set(left)
        left = {name: names for name, names in left.items() if name not in ends}


def test_modules_import_in_no_circle_also_not_for_types():
    graph = {name_of(path): imported_by(ast.parse(path.read_text())) - {name_of(path)} for path in MODULES}
    assert in_circles(graph) == set()


@pytest.mark.parametrize("folder", ["benchmarks", "tools"])
def test_files_beside_the_package_import_in_no_circle(folder):
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in (ROOT / folder).rglob("*.py")}
    graph = {name: imported_by(ast.parse(path.read_text())) - {name} for name, path in files.items()}
    assert len(graph) > 20 and in_circles(graph) == set()


def test_the_search_for_circles_can_fail():
    assert in_circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == {"b", "c"}
    assert imported_by(ast.parse("if TYPE_CHECKING:\n    from preheat.b import C\n")) == {"b", "b.C"}
    assert imported_by(ast.parse("def f():\n    import preheat.b\n")) == {"b"}
