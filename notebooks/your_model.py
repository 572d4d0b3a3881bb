# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   accelerator: GPU
#   colab: {gpuType: T4}
# ---

# %% [markdown]
# # Your model under several policies
#
# A checkpoint of the hub on a GPU or TPU: what it answers under a policy, which bytes it holds, how fast it
# writes, and what each KV head keeps. Where the hub cannot be reached, the small model inside kvjax takes its
# place.

# %%
# The runtime's jax stays: it is asked for by its version, and pip leaves it alone, or says why it cannot.
KVJAX = ""  # a checkout or a wheel on this machine, such as "/content/kvjax"; "" where kvjax is installed

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
import os
import time

import numpy as np

import kvjax

MODEL = ""  # such as "Qwen/Qwen3-0.6B"; "" takes the small model inside kvjax
DTYPE = "float16"  # of a T4; "bfloat16" of every newer device

try:  # gated models: a token among Colab's secrets
    from google.colab import userdata

    os.environ["HF_TOKEN"] = userdata.get("HF_TOKEN")
except Exception:  # not on Colab, or no such secret
    pass

try:
    model = kvjax.load(MODEL, dtype=DTYPE) if MODEL else kvjax.load()
except kvjax.UserError as error:  # no network, no such model, no access
    print(f"{error} Going on with the small model.")
    model = kvjax.load()
text = model.text
print(model.name)

# %% [markdown]
# A page with a number in it, and a question. A model with a chat template is asked in it.

# %%
filler = "The road went on between the trees, and the evening was quiet and cold. " * 10
page = filler + "The secret number for apple-river is 48213. " + filler
question = "What is the secret number for apple-river?"
if text.template is None:
    ids = text.encode(f"{page}{question} The secret number for apple-river is")
else:
    ids = text.chat([{"role": "user", "content": f"{page}\n\n{question}"}])
print(len(ids), "tokens")

# %%
policies = (
    "full",
    "int8(16)",
    "snapkv(16) + uniform(0.25)",
    "window(128) + sinks(4)",
)
new = 4 if model.name == "embedded" else 32
states, speed = {}, {}
for policy in policies:
    for _ in range(2):  # the first time compiles
        began = time.perf_counter()
        run = kvjax.generate(model, policy, [ids], max_new_tokens=new)
        speed[policy] = time.perf_counter() - began
    states[policy] = run.state
    size = kvjax.nbytes(run.state).total
    print(f"{policy:28} {text.decode(run.tokens[0])!r:16} live {size['live']:9,} bytes")

# %%
for policy, seconds in speed.items():
    print(f"{policy:28} measured: {seconds:.3f} s for {len(ids)} tokens read and {new} written")

# %% [markdown]
# What each head keeps: a line a layer and KV head, a column sixteen tokens of the prompt, dark where all of
# them are held. The number is in the middle, and a token of it is all that a head needs.

# %%
from matplotlib.figure import Figure

shown = ("snapkv(16) + uniform(0.25)", "window(128) + sinks(4)")
figure = Figure(figsize=(9, 3), layout="constrained")
for axes, policy in zip(figure.subplots(1, len(shown), sharey=True), shown):
    held = np.asarray(kvjax.metrics.present(states[policy]))[:, 0, :, : len(ids)]  # [L, K, T]
    heads = held.reshape(-1, held.shape[-1])
    columns = heads[:, : heads.shape[1] // 16 * 16].reshape(len(heads), -1, 16).mean(-1)
    edges = (0, 16 * columns.shape[1], len(heads), 0)
    axes.imshow(columns, aspect="auto", cmap="Greys", vmin=0, vmax=1, interpolation="nearest", extent=edges)
    axes.set(title=policy, xlabel="token")
    axes.title.set_fontsize(8)
figure.axes[0].set_ylabel("layer and KV head")
figure
