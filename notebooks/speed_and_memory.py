# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   accelerator: GPU
#   colab: {gpuType: T4}
# ---

# %% [markdown]
# # Speed and memory
#
# Context against bytes and time under three policies, on whatever device this runs: a CPU takes a minute, and
# a GPU or TPU runs the same cells with a larger model.

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
import time

import kvjax

model = kvjax.load()  # or kvjax.load("Qwen/Qwen3-0.6B", dtype="bfloat16"), from the hub
text = model.text
contexts, new = (256, 1024), 64
policies = ("full", "int8(16)", "window(128) + sinks(4)")

# %% [markdown]
# A prompt is read and one token is written, and again with 64 more. The first time compiles; of three later
# ones the fastest counts. `live` bytes hold tokens; `allocated` is what the device gave.

# %%
words = text.encode("The road went on between the trees, and the evening was quiet and cold. " * 200)
rows = {}
for policy in policies:
    for context in contexts:
        prompt = words[: context - new - 1]
        fastest = []
        for tokens in (1, new + 1):
            times = []
            for _ in range(4):
                began = time.perf_counter()
                run = kvjax.generate(model, policy, [prompt], max_new_tokens=tokens)
                times.append(time.perf_counter() - began)
            fastest.append(min(times[1:]))
        size = kvjax.nbytes(run.state).total
        rows[policy, context] = (fastest[0], fastest[1] - fastest[0], size["live"], size["allocated"])
        print(
            f"{policy:28} {context:5} tokens  live {size['live']:9,}  allocated {size['allocated']:9,} bytes"
        )

# %% [markdown]
# Times of this machine: a prompt read, and a token more.

# %%
for (policy, context), (read, wrote, *_) in rows.items():
    print(f"{policy:28} {context:5} tokens  measured: {read:.3f} s read, {1000 * wrote / new:.1f} ms a token")

# %%
from matplotlib.figure import Figure

figure = Figure(figsize=(9, 3.2), layout="constrained")
left, right = figure.subplots(1, 2)
styles = [("-", "o"), ("--", "s"), ("-.", "^"), (":", "v")]
for policy, (line, mark) in zip(policies, styles):
    own = [rows[policy, context] for context in contexts]
    left.plot(contexts, [x[2] / 2**20 for x in own], linestyle=line, marker=mark, label=policy)
    right.plot(contexts, [1000 * x[1] / new for x in own], linestyle=line, marker=mark, label=policy)
left.set(xlabel="context, tokens", ylabel="live, MiB", xscale="log", yscale="log")
right.set(xlabel="context, tokens", ylabel="a token, ms", xscale="log", ylim=(0, None))
for axes in (left, right):
    axes.set_xticks(contexts, [str(context) for context in contexts])
    axes.minorticks_off()
left.legend(fontsize=8)
figure

# %% [markdown]
# Without a device: `python -m kvjax.plan` compiles for TPUs and GPUs that are not here, and
# [results/plan/devices](../results/plan/devices/README.md) says which model fits which.
