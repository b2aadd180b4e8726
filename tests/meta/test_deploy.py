"""Files for containers and clusters: the things that they name exist, and longer times outlast shorter ones."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from preheat.server.openapi import OPERATIONS
from preheat.settings import OPTIONS, Settings
from tests.meta.source import ROOT

CHART = ROOT / "examples" / "helm" / "preheat"
PATHS = {operation.path for operation in OPERATIONS}
PAUSE = 5


def rendered(**values: object) -> str:
    """Return the chart's template, rendered by the few constructs that it uses."""
    text = (CHART / "templates" / "preheat.yaml").read_text()
    given = {"Values": yaml.safe_load((CHART / "values.yaml").read_text()) | values, "Release": {"Name": "llm"}}

    def look_up(path: str) -> object:
        found: object = given
        for name in path.strip(".").split("."):
            found = found[name]
        return found

    def choose(match: re.Match[str]) -> str:
        path, yes, _, no = match.groups()
        return yes if look_up(path) else no or ""

    text = re.sub(r" *{{- if (\S+) }}\n(.*?)( *{{- else }}\n(.*?))? *{{- end }}\n", choose, text, flags=re.DOTALL)
    return re.sub(r"{{ (\S+) \| toJson }}", lambda match: json.dumps(look_up(match[1])), text)


def kubernetes() -> dict[str, str]:
    example = (ROOT / "examples" / "kubernetes" / "preheat.yaml").read_text()
    return {
        "example": example,
        "chart": rendered(),
        "chart with all": rendered(apiKeySecret="keys", cacheClaim="models", replicas=3),
    }


@pytest.mark.parametrize("which", kubernetes())
def test_a_deployment_probes_drains_and_is_not_root(which):
    deployment, service = yaml.safe_load_all(kubernetes()[which])
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    check_flags([*container.get("command", ["preheat", "serve"])[2:], *container["args"]])
    probes = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    assert probes == {"startup": "/ready", "readiness": "/ready", "liveness": "/live"}
    assert set(probes.values()) <= PATHS
    drain = float(next(arg for arg in container["args"] if arg.startswith("--shutdown-timeout")).split("=")[1])
    assert container["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", str(PAUSE)]
    assert pod["terminationGracePeriodSeconds"] > drain + PAUSE
    assert pod["securityContext"]["runAsNonRoot"]
    assert {"/cache", "/dev/shm"} == {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {volume["name"] for volume in pod["volumes"]} == {mount["name"] for mount in container["volumeMounts"]}
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert service["spec"]["selector"].items() <= labels.items()


def test_several_nodes_are_one_group_with_a_serving_leader():
    """Several nodes are one group, with a CPU of Ray's on each pod.

    Its leader serves. Probes and drain equal the Deployment's.
    """
    text = (ROOT / "examples" / "kubernetes" / "several-nodes.yaml").read_text()
    group, service = yaml.safe_load_all(text)
    template = group["spec"]["leaderWorkerTemplate"]
    leader, worker = (template[f"{part}Template"]["spec"]["containers"][0] for part in ("leader", "worker"))
    head, _, serve = leader["command"][2].partition(" && exec preheat serve ")
    check_flags(serve.split())
    ranks = int(re.search(r"--tensor-parallel-size=(\d)", serve)[1])
    assert "--distributed-executor-backend=ray" in serve and ranks == template["size"]
    assert head.startswith("ray start --head --port=6379 ") and "--num-cpus=1" in head
    assert worker["command"][2].startswith("exec ray start --address=$LWS_LEADER_ADDRESS:6379 --num-cpus=1")
    assert worker["command"][2].endswith("--block") and template["restartPolicy"] == "RecreateGroupOnPodRestart"
    alone = yaml.safe_load(kubernetes()["example"].split("---")[0])["spec"]["template"]["spec"]
    (container,) = alone["containers"]
    for name in ("startupProbe", "readinessProbe", "livenessProbe", "lifecycle", "ports"):
        assert leader[name] == container[name]
    assert template["leaderTemplate"]["spec"]["terminationGracePeriodSeconds"] == alone["terminationGracePeriodSeconds"]
    labels = template["leaderTemplate"]["metadata"]["labels"] | {"leaderworkerset.sigs.k8s.io/name": "preheat"}
    assert service["spec"]["selector"] == labels


def test_the_chart_takes_its_values():
    deployment, _ = yaml.safe_load_all(kubernetes()["chart with all"])
    pod = deployment["spec"]["template"]["spec"]
    (variable,) = pod["containers"][0]["env"]
    assert variable["name"] == OPTIONS["api_key"].env
    assert variable["valueFrom"]["secretKeyRef"] == {"name": "keys", "key": "api-key"}
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "models"}
    assert deployment["spec"]["replicas"] == 3


def test_compose_waits_for_the_drain():
    (service,) = yaml.safe_load((ROOT / "examples" / "compose" / "compose.yaml").read_text())["services"].values()
    check_flags(service["command"])
    drain = next(flag for flag in service["command"] if flag.startswith("--shutdown-timeout")).split("=")[1]
    assert int(service["stop_grace_period"].removesuffix("s")) > int(drain)


def check_flags(flags: list[str]) -> None:
    for flag in flags:
        name, _, value = flag.removeprefix("--").partition("=")
        option = OPTIONS[name.replace("-", "_")]
        assert option.convert(value or True, flag) is not None


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_an_image_copies_all_files_of_an_installation(kind, tmp_path):
    text = (ROOT / "docker" / f"Dockerfile.{kind}").read_text()
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE):
        *sources, target = line.split()
        for source in sources:
            assert f"!{source}" in ignored
            place = tmp_path / (Path(source).name if target == "./" else target)
            place.parent.mkdir(parents=True, exist_ok=True)
            copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
            copy(ROOT / source, place)
    for name in ("pyproject.toml", "constraints.txt", "scripts/install", "README.md", "LICENSE"):
        assert (tmp_path / name).is_file()
    assert re.search(r"^USER [1-9]", text, re.MULTILINE)
    assert "HEALTHCHECK" in text and "'http://127.0.0.1:8000/health'" in text
    entry = json.loads(re.search(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)[1])
    assert entry == ["preheat", "serve"]
    assert "CMD" not in re.findall(r"^\w+", text, re.MULTILINE)  # arguments of docker run would replace it
    (address,) = re.findall(r"^ENV PREHEAT_HOST=(.*)$", text, re.MULTILINE)
    environment = {"PREHEAT_HOST": address}
    assert Settings.load({"model": "m", "port": 9000}, environment).host == "0.0.0.0"
    assert Settings.load({"model": "m", "host": "::1"}, environment).host == "::1"
    for name in re.findall(r"(PREHEAT_\w+)=/", text):
        assert OPTIONS[name.removeprefix("PREHEAT_").lower()]
    command = [sys.executable, "-m", "preheat", "plan"]
    planned = subprocess.run(
        command, env={"PYTHONPATH": str(tmp_path / "src")}, capture_output=True, text=True, check=False
    )
    assert planned.returncode == 0, planned.stderr
    assert "programs" in planned.stdout


def test_the_threat_models_tests_exist():
    named = re.findall(r"`(tests/\S+\.py)`", (ROOT / "SECURITY.md").read_text())
    assert len(named) >= 5
    assert [path for path in named if not (ROOT / path).is_file()] == []
