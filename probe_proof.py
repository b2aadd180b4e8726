"""What the proof costs and finds on a GPU: python probe_proof.py; JSON under $OUT. Deadline 100 s."""
import json, os, subprocess, sys, time
out = os.environ.get("OUT", "."); env = os.environ | {"PYTHONPATH": "src", "PREHEAT_CACHE_DIR": "off"}
end, found = time.time() + 100, {}

def run(name, *command):
    left = end - time.time()
    if left < 5:
        found[name] = "no time left"; return
    began = time.time()
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=left)
        found[name] = {"rc": done.returncode, "s": round(time.time() - began, 1), "out": done.stdout, "err": done.stderr[-1500:]}
    except subprocess.TimeoutExpired:
        found[name] = "timed out"

CHECK = """
import sys, json
from preheat.core import Ready
from preheat.engine.mailbox import InlineMailbox
from preheat.settings import Settings
from preheat.startup import boot_engine
from preheat.warmup.record import Record
m = InlineMailbox(); boot_engine(Settings.load(json.loads(sys.argv[1])), m)
r = next(x for x in m.receive() if isinstance(x, Ready)); rec = Record.from_json(r.record)
print(json.dumps({"digest": rec.proof.digest, "compared": rec.proof.compared, "held": r.held,
  "checks": {e.name: [e.outcome, e.reason, round(e.touch_seconds, 4)] for e in rec.entries if e.kind == "check"},
  "check_s": [s.seconds for s in rec.steps if s.name == "check"], "warm_s": rec.seconds}))
"""
py = sys.executable
small = {"device": "cuda"}
big = {"device": "cuda", "model": "tests/models/llama-3.1-8b", "load_format": "dummy", "max_model_len": 4096, "skip_tokenizer_init": True}
run("bundled boot", py, "-c", CHECK, json.dumps(small))
run("8B boot", py, "-c", CHECK, json.dumps(big))
run("verify reduced", py, "-m", "preheat", "verify", "--reduced", "--device", "cuda", "--log-level", "error")
run("bundled boot again", py, "-c", CHECK, json.dumps(small))
run("tests", py, "-m", "pytest", "-q", "tests/cuda/test_proof.py")
json.dump(found, open(os.path.join(out, "probe_proof.json"), "w"), indent=1)
for name, value in found.items():
    print("==", name, value if isinstance(value, str) else f"rc {value['rc']} {value['s']} s\n{value['out'][-1800:]}\n{value['err'][-600:] if value['rc'] else ''}")
