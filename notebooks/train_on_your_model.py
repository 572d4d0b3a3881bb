# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   accelerator: GPU
#   colab: {gpuType: T4}
# ---

# %% [markdown]
# # Train a write gate on your model
#
# WG-KV's gates say of every token, when it is written, whether it outlives the newest ones. They are trained
# on a frozen model: its hidden states through gates should be those without, at few tokens kept. That takes a
# minute or two of a CPU with the model inside kvjax; the config of another model names its own data.

# %%
# The runtime's jax stays: it is asked for by its version, and pip leaves it alone, or says why it cannot.
KVJAX = ""  # a checkout on this machine, such as "/content/kvjax" (a wheel has no trainers); "" uses this one

if KVJAX:
    import subprocess
    import sys
    from importlib.metadata import version

    pip = [sys.executable, "-m", "pip", "install", "--quiet", KVJAX, f"jax=={version('jax')}"]
    subprocess.run(pip, check=True)

# %%
from kvjax import doctor

doctor.need("plot")
print("\n".join((*doctor.software(), *doctor.devices())))

# %%
import json
import sys
import tempfile
from pathlib import Path

import yaml

import kvjax

checkout = next(
    (folder for folder in (Path(KVJAX or "."), Path("..")) if (folder / "train/gates.py").is_file()), None
)
if checkout is None:
    raise SystemExit(
        "The trainers are in the checkout only. Set KVJAX to its folder, or start Jupyter in it."
    )
sys.path.insert(0, str(checkout.resolve()))

from train import gate_settings, gates

# %% [markdown]
# A config of the repository, shortened: 24 updates of 1,024 tokens instead of 600 of 2,048.

# %%
CONFIG, MODEL = "embedded", "embedded"  # or "smollm2-135m" and "HuggingFaceTB/SmolLM2-135M-Instruct"

folder = Path(tempfile.mkdtemp())
config = yaml.safe_load((checkout / f"configs/gates/{CONFIG}.yaml").read_text())
config |= {"folder": str(folder / "runs/gates")}
config["plan"] |= {"steps": 24, "log_every": 2, "check_every": 24, "save_every": 24}
config["data"] |= {"tokens": 1024, "lengths": [512], "shares": [1]}
config["check"] = {"lengths": [512], "rows": 2}
settings = gate_settings.parse(config, source=MODEL)
state = gates.run(settings)

# %% [markdown]
# The loss is how far the hidden states are off, plus lambda (0.3) times the share of slots that are held.

# %%
from matplotlib.figure import Figure

log = [json.loads(line) for line in (settings.folder / "log.jsonl").read_text().splitlines()]
steps = [line for line in log if "loss" in line]
figure = Figure(figsize=(6, 3), layout="constrained")
axes = figure.subplots()
for name, line in (("loss", "-"), ("distill", "--"), ("gate", ":")):
    label = {"distill": "hidden states", "gate": "mean gate"}.get(name, name)
    axes.plot([row["step"] for row in steps], [row[name] for row in steps], line, label=label)
axes.set(xlabel="update", ylim=(0, None))
axes.legend(fontsize=8)
figure

# %% [markdown]
# The gates as a file, and the model with them: `kvjax.serve` and `kvjax.eval` take it as `--weights
# write_gate=FILE`. A window alone has dropped the number; gates let it through, with these bytes.

# %%
from kvjax.policies.wg_kv import WriteGate

model = kvjax.load(None if MODEL == "embedded" else MODEL)
text, window = model.text, settings.gate.window
file = folder / "gates.safetensors"
kvjax.save_weights(file, model, WriteGate(window=window), state.params["admission"])

words = "The road went on between the trees, and the evening was quiet and cold. " * 10
question = "What is the secret number for apple-river? The secret number for apple-river is"
prompt = text.encode(f"{words}The secret number for apple-river is 48213. {words}{question}")
for policy in ("full", f"window({window}) + sinks(4)", f"write_gate(0.1, window={window}) + sinks(4)"):
    weights = kvjax.weights_for(policy, model, str(file) if "gate" in policy else None)
    run = kvjax.generate(model, policy, [prompt], max_new_tokens=3, weights=weights)
    live = kvjax.nbytes(run.state).total["live"]
    print(f"{policy:38} measured: {text.decode(run.tokens[0])!r:10} {live:9,} bytes live")
